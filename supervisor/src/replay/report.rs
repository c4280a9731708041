//! What a play has shown, for a person and for a program.
//!
//! Pure; the caller prints.

use std::fmt::{self, Write as _};
use std::path::PathBuf;
use std::time::Duration;

use serde::Serialize;
use serde::ser::{SerializeStruct, Serializer};
use turnhost_protocol::json::quoted;

use super::pattern::Mismatch;

/// Longest value that a table of differences shows, in bytes.
const VALUE_BYTES: usize = 200;

/// The outcome of one fixture.
#[derive(Debug)]
pub struct Report {
    /// The fixture's name: its file name without the ending.
    pub name: String,
    /// The fixture's file.
    pub path: PathBuf,
    /// Turns that have ended.
    pub turns: u64,
    /// Lines sent to the host.
    pub sent: u64,
    /// Frames received from it.
    pub received: u64,
    /// How long the play took.
    pub elapsed: Duration,
    /// Where the host differs; `None` where it does not.
    pub failure: Option<Failure>,
}

/// Where a host differs from a fixture, with all that helps to see why.
#[derive(Debug, Serialize)]
pub struct Failure {
    /// The line of the fixture, counted from 1.
    pub line: usize,
    /// That line, cut where it is long.
    pub fixture_line: String,
    /// What has happened.
    pub what: String,
    /// What the fixture says of the recording right above the line.
    pub differs: Option<String>,
    /// The frame that came, cut where it is long; the nearest one where none fits.
    pub got: Option<String>,
    /// Where that frame differs.
    pub mismatches: Vec<Mismatch>,
    /// The last lines sent.
    pub last_sent: Vec<String>,
    /// The last frames received.
    pub last_received: Vec<String>,
    /// The last of the host's stderr.
    pub stderr: String,
}

impl Report {
    /// Whether the host did what the fixture says.
    #[must_use]
    pub fn is_good(&self) -> bool {
        self.failure.is_none()
    }
}

/// One line, and below it the difference where there is one.
impl fmt::Display for Report {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let verdict = if self.is_good() { "ok  " } else { "FAIL" };
        let turns = if self.turns == 1 { "turn" } else { "turns" };
        let seconds = self.elapsed.as_secs_f64();
        write!(
            formatter,
            "{verdict}  {}  {} {turns}, {seconds:.1} s",
            self.name, self.turns
        )?;
        match &self.failure {
            Some(failure) => {
                write!(
                    formatter,
                    "\n  {}:{}: {failure}",
                    self.path.display(),
                    failure.line
                )
            }
            None => Ok(()),
        }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(formatter, "{}", self.what)?;
        writeln!(formatter, "  line  {}", self.fixture_line)?;
        if let Some(got) = &self.got {
            writeln!(formatter, "  got   {got}")?;
        }
        if let Some(differs) = &self.differs {
            writeln!(formatter, "  note  {differs}")?;
        }
        if !self.mismatches.is_empty() {
            formatter.write_str(&table(&self.mismatches))?;
        }
        section(
            formatter,
            "last sent",
            ">",
            self.last_sent.iter().map(String::as_str),
        )?;
        section(
            formatter,
            "last received",
            "<",
            self.last_received.iter().map(String::as_str),
        )?;
        section(formatter, "stderr of the host", "|", self.stderr.lines())
    }
}

/// The differing fields, one a line, in columns.
fn table(mismatches: &[Mismatch]) -> String {
    let row = |path: &str, expected: &str, got: &str| {
        [
            path.to_owned(),
            quoted(expected, VALUE_BYTES),
            quoted(got, VALUE_BYTES),
        ]
    };
    let mut rows = vec![row("field", "expected", "got")];
    for Mismatch {
        path,
        expected,
        got,
    } in mismatches
    {
        rows.push(row(
            path,
            expected,
            got.as_deref().unwrap_or("no such field"),
        ));
    }
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max();
    let (path_width, expected_width) = (width(0).unwrap_or(0), width(1).unwrap_or(0));
    let mut text = String::new();
    for [path, expected, got] in &rows {
        // Writing to a string does not fail.
        let _ = writeln!(
            text,
            "    {path:path_width$}  {expected:expected_width$}  {got}"
        );
    }
    text
}

fn section<'a>(
    formatter: &mut fmt::Formatter<'_>,
    title: &str,
    mark: &str,
    lines: impl Iterator<Item = &'a str>,
) -> fmt::Result {
    for (index, line) in lines.enumerate() {
        if index == 0 {
            writeln!(formatter, "  {title}")?;
        }
        writeln!(formatter, "    {mark} {line}")?;
    }
    Ok(())
}

/// One JSON object, with times in seconds.
impl Serialize for Report {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut fields = serializer.serialize_struct("Report", 8)?;
        fields.serialize_field("name", &self.name)?;
        fields.serialize_field("file", &self.path.to_string_lossy())?;
        fields.serialize_field("ok", &self.is_good())?;
        fields.serialize_field("turns", &self.turns)?;
        fields.serialize_field("sent", &self.sent)?;
        fields.serialize_field("received", &self.received)?;
        fields.serialize_field("seconds", &self.elapsed.as_secs_f64())?;
        fields.serialize_field("failure", &self.failure)?;
        fields.end()
    }
}

#[cfg(test)]
mod tests {
    use expect_test::expect;

    use super::*;

    fn report(failure: Option<Failure>) -> Report {
        Report {
            name: "echo".to_owned(),
            path: "fixtures/echo.jsonl".into(),
            turns: 1,
            sent: 2,
            received: 9,
            elapsed: Duration::from_millis(420),
            failure,
        }
    }

    fn failure() -> Failure {
        let mismatch = |path: &str, expected: &str, got: Option<&str>| Mismatch {
            path: path.to_owned(),
            expected: expected.to_owned(),
            got: got.map(str::to_owned),
        };
        Failure {
            line: 7,
            fixture_line: r#"{"out": {"type": "turn.end"}}"#.to_owned(),
            what: "another frame came in its place".to_owned(),
            differs: Some("§5: a turn has one end".to_owned()),
            got: Some(r#"{"type":"rpc"}"#.to_owned()),
            mismatches: vec![
                mismatch("type", r#""turn.end""#, Some(r#""rpc""#)),
                mismatch("history_version", "2", None),
            ],
            last_sent: vec![r#"{"type":"turn.start"}"#.to_owned()],
            last_received: vec!["{}".to_owned(), r#"{"type":"rpc"}"#.to_owned()],
            stderr: "WARN slow\nERROR gone\n".to_owned(),
        }
    }

    #[test]
    fn a_good_play_is_one_line() {
        expect!["ok    echo  1 turn, 0.4 s"].assert_eq(&report(None).to_string());
    }

    #[test]
    fn a_difference_shows_all_that_is_known() {
        expect![[r#"
            FAIL  echo  1 turn, 0.4 s
              fixtures/echo.jsonl:7: another frame came in its place
              line  {"out": {"type": "turn.end"}}
              got   {"type":"rpc"}
              note  §5: a turn has one end
                field            expected    got
                type             "turn.end"  "rpc"
                history_version  2           no such field
              last sent
                > {"type":"turn.start"}
              last received
                < {}
                < {"type":"rpc"}
              stderr of the host
                | WARN slow
                | ERROR gone
        "#]]
        .assert_eq(&report(Some(failure())).to_string());
    }

    #[test]
    fn a_program_gets_one_object() {
        expect![[r#"{"name":"echo","file":"fixtures/echo.jsonl","ok":false,"turns":1,"sent":2,"received":9,"seconds":0.42,"failure":{"line":7,"fixture_line":"{\"out\": {\"type\": \"turn.end\"}}","what":"another frame came in its place","differs":"§5: a turn has one end","got":"{\"type\":\"rpc\"}","mismatches":[{"path":"type","expected":"\"turn.end\"","got":"\"rpc\""},{"path":"history_version","expected":"2","got":null}],"last_sent":["{\"type\":\"turn.start\"}"],"last_received":["{}","{\"type\":\"rpc\"}"],"stderr":"WARN slow\nERROR gone\n"}}"#]].assert_eq(&serde_json::to_string(&report(Some(failure()))).unwrap());
    }
}
