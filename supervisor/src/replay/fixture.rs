//! A transcript as a file: JSON Lines, each an object with one verb; see `fixtures/README.md`.
//!
//! Reading is all or nothing: a fixture that is played has no bad line. Touches only the file that
//! it reads.

use std::collections::{BTreeMap, HashSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use rustix::process::Signal;
use serde::Deserialize;
use serde_json::value::RawValue;
use turnhost_protocol::json::quoted;
use turnhost_protocol::limits::{MAX_MAX_FRAME_BYTES, MAX_QUOTED_BYTES};

use super::json::Json;
use super::pattern::{Pattern, find_id};

/// How long one line waits for what it expects when it says nothing else.
const WITHIN: Duration = Duration::from_secs(30);

/// A transcript, checked and ready to be played.
#[derive(Debug)]
pub struct Fixture {
    pub(super) path: PathBuf,
    pub(super) host: HostSetup,
    pub(super) lines: Vec<Line>,
}

/// How the host is started.
#[derive(Debug, Default)]
pub(super) struct HostSetup {
    pub(super) args: Vec<String>,
    pub(super) env: BTreeMap<String, String>,
    /// JSON for a file that the host gets as `--script`.
    pub(super) script: Option<Box<RawValue>>,
}

/// One line of a fixture.
#[derive(Debug)]
pub(super) struct Line {
    /// Counted from 1, as editors do.
    pub(super) number: usize,
    /// The line itself, cut where it is long.
    pub(super) text: String,
    pub(super) within: Duration,
    pub(super) verb: Verb,
}

/// What a line does.
#[derive(Debug)]
pub(super) enum Verb {
    In(Vec<Piece>),
    Out(Expected),
    Deltas(Deltas),
    Signal(Signal),
    CloseStdin,
    ParentDies,
    Pause(Duration),
    Exit(Exit),
    /// A step of the recording that is left out, and why.
    Cut,
    /// Why the lines that follow differ from the recording.
    Differs(String),
}

/// Bytes for the host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Piece {
    Bytes(Vec<u8>),
    /// The value of `<id:NAME>`.
    Id(String),
    Repeat(String, usize),
}

/// A frame that has to arrive.
#[derive(Debug)]
pub(super) struct Expected {
    pub(super) pattern: Pattern,
    pub(super) exact: bool,
    /// Another frame may stand in its place.
    pub(super) optional: bool,
}

/// Neighbouring deltas of one session.
#[derive(Debug)]
pub(super) struct Deltas {
    pub(super) sid: String,
    pub(super) kind: String,
    /// What their texts join to; `None` for any number of them, none included.
    pub(super) text: Option<String>,
}

/// How a process has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Exit {
    Code(i32),
    Signal(i32),
}

/// A fixture that cannot be played.
#[derive(Debug, thiserror::Error)]
pub enum FixtureError {
    /// The file could not be read as text.
    #[error("{}: cannot read the fixture: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// A line is not what a fixture may hold.
    #[error("{}:{line}: {problem}", path.display())]
    Line {
        /// The file.
        path: PathBuf,
        /// The line, counted from 1.
        line: usize,
        /// What is wrong, and what is allowed.
        problem: String,
    },
}

impl Fixture {
    /// Reads the fixture at `path`.
    ///
    /// # Errors
    /// The file cannot be read, or a line of it is wrong.
    pub fn read(path: &Path) -> Result<Self, FixtureError> {
        let text = fs::read_to_string(path).map_err(|source| FixtureError::Read {
            path: path.to_owned(),
            source,
        })?;
        Self::parse(path, &text)
    }

    /// The file's name without its ending.
    #[must_use]
    pub fn name(&self) -> String {
        self.path
            .file_stem()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned()
    }

    /// Whether the host needs a parent that can die before it.
    pub(super) fn has_mortal_parent(&self) -> bool {
        self.lines
            .iter()
            .any(|line| matches!(line.verb, Verb::ParentDies))
    }

    fn parse(path: &Path, text: &str) -> Result<Self, FixtureError> {
        let mut reader = Reader::default();
        let mut last = 0;
        for (index, line) in text.lines().enumerate() {
            if !line.trim().is_empty() {
                last = index + 1;
                reader
                    .line(last, line)
                    .map_err(|problem| FixtureError::Line {
                        path: path.to_owned(),
                        line: last,
                        problem,
                    })?;
            }
        }
        if !reader.ended {
            return Err(FixtureError::Line {
                path: path.to_owned(),
                line: last.max(1),
                problem: r#"the last line has to be an exit, such as {"exit": 0}"#.to_owned(),
            });
        }
        Ok(Self {
            path: path.to_owned(),
            host: reader.host,
            lines: reader.lines,
        })
    }
}

/// What the lines so far have said.
#[derive(Default)]
struct Reader {
    host: HostSetup,
    lines: Vec<Line>,
    begun: bool,
    ended: bool,
    hello: bool,
    ids: HashSet<String>,
}

/// A line as it stands in the file: one verb, and what goes with it.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Written<'a> {
    #[serde(rename = "why")]
    _why: Option<String>,
    within_ms: Option<u64>,
    exact: Option<bool>,
    optional: Option<bool>,
    lf: Option<bool>,
    #[serde(borrow)]
    script: Option<&'a RawValue>,

    host: Option<WrittenHost>,
    #[serde(borrow, rename = "in")]
    frame: Option<&'a RawValue>,
    in_text: Option<String>,
    in_base64: Option<String>,
    in_parts: Option<Vec<WrittenPart>>,
    #[serde(borrow)]
    out: Option<&'a RawValue>,
    #[serde(borrow)]
    event: Option<WrittenEvent<'a>>,
    deltas: Option<WrittenDeltas>,
    signal: Option<String>,
    close: Option<WrittenStream>,
    parent_dies: Option<bool>,
    pause_ms: Option<u64>,
    exit: Option<WrittenExit>,
    cut: Option<String>,
    differs: Option<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct WrittenHost {
    #[serde(default)]
    args: Vec<String>,
    #[serde(default)]
    env: BTreeMap<String, String>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum WrittenPart {
    Text(String),
    Repeat(WrittenRepeat),
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct WrittenRepeat {
    repeat: String,
    count: usize,
}

/// Short for a frame of type `rpc` with an event of a session.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct WrittenEvent<'a> {
    sid: String,
    #[serde(rename = "type")]
    kind: String,
    #[serde(borrow)]
    payload: Option<&'a RawValue>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct WrittenDeltas {
    sid: String,
    #[serde(rename = "type", default = "message_delta")]
    kind: String,
    text: String,
}

fn message_delta() -> String {
    "message.delta".to_owned()
}

#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
enum WrittenStream {
    Stdin,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum WrittenExit {
    Code(i32),
    Signal(String),
}

impl Reader {
    fn line(&mut self, number: usize, text: &str) -> Result<(), String> {
        let written: Written = serde_json::from_str(text).map_err(|error| told(&error))?;
        let first = !std::mem::replace(&mut self.begun, true);
        let within = written.within_ms.map_or(WITHIN, Duration::from_millis);
        if let Some(verb) = self.verb(written, first)? {
            if self.ended && !matches!(verb, Verb::Cut | Verb::Differs(_)) {
                return Err("nothing but cut and differs may follow the exit".to_owned());
            }
            self.ended |= matches!(verb, Verb::Exit(_));
            let text = quoted(text, MAX_QUOTED_BYTES);
            self.lines.push(Line {
                number,
                text,
                within,
                verb,
            });
        }
        Ok(())
    }

    /// The one verb of a line; `None` for `host`.
    fn verb(&mut self, written: Written<'_>, first: bool) -> Result<Option<Verb>, String> {
        let mut verbs = Vec::new();
        let compares = written.out.is_some() || written.event.is_some();
        let waits = compares || written.deltas.is_some() || written.exit.is_some();
        let sends =
            written.in_text.is_some() || written.in_base64.is_some() || written.in_parts.is_some();
        let (exact, optional) = (
            written.exact.unwrap_or(false),
            written.optional.unwrap_or(false),
        );
        if let Some(host) = written.host {
            if !first {
                return Err("host has to be the first line".to_owned());
            }
            let script = written.script.map(ToOwned::to_owned);
            self.host = HostSetup {
                args: host.args,
                env: host.env,
                script,
            };
            verbs.push(None);
        } else if written.script.is_some() {
            return Err("script belongs to the line of the host".to_owned());
        }
        if let Some(frame) = written.frame {
            verbs.push(Some(Verb::In(self.with_ids(frame.get(), true)?)));
        }
        let line_end = written.lf.unwrap_or(true);
        if let Some(text) = written.in_text {
            verbs.push(Some(Verb::In(self.with_ids(&text, line_end)?)));
        }
        if let Some(text) = written.in_base64 {
            let bytes = BASE64
                .decode(text)
                .map_err(|error| format!("in_base64: {error}"))?;
            verbs.push(Some(Verb::In(with_line_end(
                vec![Piece::Bytes(bytes)],
                line_end,
            ))));
        }
        if let Some(parts) = written.in_parts {
            verbs.push(Some(Verb::In(with_line_end(pieces(parts)?, line_end))));
        }
        if let Some(frame) = written.out {
            let frame = Json::parse(frame.get()).map_err(|error| told(&error))?;
            verbs.push(Some(Verb::Out(self.expected(frame, exact, optional)?)));
        }
        if let Some(event) = written.event {
            let frame = event.frame().map_err(|error| told(&error))?;
            verbs.push(Some(Verb::Out(self.expected(frame, exact, optional)?)));
        }
        if let Some(deltas) = written.deltas {
            verbs.push(Some(Verb::Deltas(self::deltas(deltas)?)));
        }
        if let Some(name) = written.signal {
            verbs.push(Some(Verb::Signal(signal(&name)?)));
        }
        if let Some(WrittenStream::Stdin) = written.close {
            verbs.push(Some(Verb::CloseStdin));
        }
        if written.parent_dies == Some(true) {
            if !self.hello {
                return Err(
                    "parent_dies needs the hello before it, which names the host".to_owned(),
                );
            }
            verbs.push(Some(Verb::ParentDies));
        }
        if let Some(pause) = written.pause_ms {
            verbs.push(Some(Verb::Pause(Duration::from_millis(pause))));
        }
        if let Some(exit) = written.exit {
            verbs.push(Some(Verb::Exit(match exit {
                WrittenExit::Code(code) => Exit::Code(code),
                WrittenExit::Signal(name) => Exit::Signal(signal(&name)?.as_raw()),
            })));
        }
        if written.cut.is_some() {
            verbs.push(Some(Verb::Cut));
        }
        if let Some(why) = written.differs {
            verbs.push(Some(Verb::Differs(why)));
        }
        let count = verbs.len();
        let verb = verbs.pop().filter(|_| count == 1).ok_or_else(|| {
            format!(
                "a line has one verb, this one has {count}; verbs: host, in, in_text, in_base64, \
                 in_parts, out, event, deltas, signal, close, parent_dies, pause_ms, exit, cut, differs"
            )
        })?;
        let misplaced = [
            (
                written.within_ms.is_some() && !waits,
                "within_ms",
                "out, event, deltas or exit",
            ),
            (
                written.exact.is_some() && !compares,
                "exact",
                "out or event",
            ),
            (
                written.optional.is_some() && !compares,
                "optional",
                "out or event",
            ),
            (
                written.lf.is_some() && !sends,
                "lf",
                "in_text, in_base64 or in_parts",
            ),
        ];
        match misplaced.iter().find(|(wrong, ..)| *wrong) {
            Some((_, option, verbs)) => Err(format!("{option} goes only with {verbs}")),
            None => Ok(verb),
        }
    }

    fn expected(&mut self, frame: Json, exact: bool, optional: bool) -> Result<Expected, String> {
        let pattern = Pattern::compile(frame)?;
        let kind = pattern
            .text("type")
            .ok_or("out: the frame needs its type, as text")?;
        self.hello |= kind == "hello";
        self.ids
            .extend(pattern.ids().into_iter().map(str::to_owned));
        Ok(Expected {
            pattern,
            exact,
            optional,
        })
    }

    /// `text` with the places where a value of `<id:NAME>` goes in.
    fn with_ids(&self, text: &str, line_end: bool) -> Result<Vec<Piece>, String> {
        let mut pieces = Vec::new();
        let mut rest = text;
        while let Some((range, name)) = find_id(rest) {
            if !self.ids.contains(name) {
                return Err(format!(
                    "<id:{name}> has no value: no out line above names it"
                ));
            }
            pieces.push(Piece::Bytes(rest[..range.start].into()));
            pieces.push(Piece::Id(name.to_owned()));
            rest = &rest[range.end..];
        }
        pieces.push(Piece::Bytes(rest.into()));
        Ok(with_line_end(pieces, line_end))
    }
}

impl WrittenEvent<'_> {
    fn frame(self) -> serde_json::Result<Json> {
        let text = |text: &str| Json::Text(text.to_owned());
        let object = |fields: Vec<(&str, Json)>| {
            Json::Object(
                fields
                    .into_iter()
                    .map(|(name, value)| (name.to_owned(), value))
                    .collect(),
            )
        };
        let sid = Json::Text(self.sid);
        let mut params = vec![("type", Json::Text(self.kind)), ("session_id", sid.clone())];
        if let Some(payload) = self.payload {
            params.push(("payload", Json::parse(payload.get())?));
        }
        let message = object(vec![
            ("jsonrpc", text("2.0")),
            ("method", text("event")),
            ("params", object(params)),
        ]);
        Ok(object(vec![
            ("type", text("rpc")),
            ("sid", sid),
            ("message", message),
        ]))
    }
}

fn with_line_end(mut pieces: Vec<Piece>, line_end: bool) -> Vec<Piece> {
    if line_end {
        pieces.push(Piece::Bytes(b"\n".into()));
    }
    pieces
}

fn pieces(parts: Vec<WrittenPart>) -> Result<Vec<Piece>, String> {
    let mut bytes = 0_usize;
    let mut pieces = Vec::new();
    for part in parts {
        let (piece, length) = match part {
            WrittenPart::Text(text) => {
                let length = text.len();
                (Piece::Bytes(text.into()), length)
            }
            WrittenPart::Repeat(WrittenRepeat { repeat, count }) => {
                let length = repeat.len().saturating_mul(count);
                (Piece::Repeat(repeat, count), length)
            }
        };
        pieces.push(piece);
        bytes = bytes.saturating_add(length);
    }
    if bytes > MAX_MAX_FRAME_BYTES {
        return Err(format!(
            "in_parts: {bytes} bytes; allowed are {MAX_MAX_FRAME_BYTES}"
        ));
    }
    Ok(pieces)
}

fn deltas(WrittenDeltas { sid, kind, text }: WrittenDeltas) -> Result<Deltas, String> {
    if !kind.ends_with(".delta") {
        return Err(format!(
            "deltas: {kind} is no type of deltas, such as message.delta"
        ));
    }
    match Pattern::compile(Json::Text(text))? {
        Pattern::Exactly(Json::Text(text)) => Ok(Deltas {
            sid,
            kind,
            text: Some(text),
        }),
        Pattern::Of(super::pattern::Kind::Any) => Ok(Deltas {
            sid,
            kind,
            text: None,
        }),
        _ => Err("deltas: text is the joined text or <any>".to_owned()),
    }
}

/// The signals that a fixture may name.
const SIGNALS: [(&str, Signal); 15] = [
    ("TERM", Signal::TERM),
    ("INT", Signal::INT),
    ("HUP", Signal::HUP),
    ("QUIT", Signal::QUIT),
    ("KILL", Signal::KILL),
    ("STOP", Signal::STOP),
    ("CONT", Signal::CONT),
    ("ABRT", Signal::ABORT),
    ("SEGV", Signal::SEGV),
    ("BUS", Signal::BUS),
    ("ILL", Signal::ILL),
    ("FPE", Signal::FPE),
    ("PIPE", Signal::PIPE),
    ("USR1", Signal::USR1),
    ("USR2", Signal::USR2),
];

fn signal(name: &str) -> Result<Signal, String> {
    SIGNALS
        .iter()
        .find(|(known, _)| *known == name)
        .map(|(_, signal)| *signal)
        .ok_or_else(|| {
            let known: Vec<_> = SIGNALS.iter().map(|(known, _)| *known).collect();
            format!("unknown signal {name}; allowed: {}", known.join(", "))
        })
}

/// The name of a signal as fixtures write it.
pub(super) fn signal_name(number: i32) -> Option<&'static str> {
    SIGNALS
        .iter()
        .find(|(_, signal)| signal.as_raw() == number)
        .map(|(name, _)| *name)
}

/// `error` without its line number, which counts within the one line that was read.
fn told(error: &serde_json::Error) -> String {
    let text = error.to_string();
    match text.rsplit_once(" at line ") {
        Some((problem, _)) => format!("{problem} (column {})", error.column()),
        None => text,
    }
}

#[cfg(test)]
mod tests {
    use expect_test::{Expect, expect};

    use super::*;

    fn parse(text: &str) -> Result<Fixture, FixtureError> {
        Fixture::parse(Path::new("a.jsonl"), text)
    }

    #[track_caller]
    fn check(text: &str, expected: Expect) {
        expected.assert_eq(&parse(text).map_or_else(|error| error.to_string(), |_| "good".into()));
    }

    #[test]
    fn every_verb_is_read() {
        let fixture = parse(
            r#"{"host": {"args": ["--workers", "2"], "env": {"A": "b"}}, "script": {"turns": [[]]}}
{"out": {"type": "hello", "host_pid": "<pid>"}, "exact": true, "within_ms": 5}
{"in": {"type": "x",  "n": 1e3}, "why": "spaces and digits stay"}

{"in_text": "{broken", "lf": false}
{"in_base64": "/w=="}
{"in_parts": ["{", {"repeat": "x", "count": 3}]}
{"event": {"sid": "s1", "type": "message.start", "payload": "<absent>"}, "optional": true}
{"deltas": {"sid": "s1", "text": "a b"}}
{"deltas": {"sid": "s1", "type": "reasoning.delta", "text": "<any>"}}
{"signal": "TERM"}
{"close": "stdin"}
{"parent_dies": true}
{"pause_ms": 7}
{"differs": "words"}
{"exit": "KILL"}
{"cut": "words"}
"#,
        )
        .unwrap();
        let verbs: Vec<_> = fixture
            .lines
            .iter()
            .map(|line| {
                let verb = match &line.verb {
                    Verb::Out(expected) => format!("{expected:?}"),
                    Verb::In(pieces) => format!("in {pieces:?}"),
                    verb => format!("{verb:?}"),
                };
                format!("{} {:?} {verb}\n", line.number, line.within)
            })
            .collect();
        expect![[r#"
            2 5ms Expected { pattern: Object([("type", Exactly(Text("hello"))), ("host_pid", Of(Pid))]), exact: true, optional: false }
            3 30s in [Bytes([123, 34, 116, 121, 112, 101, 34, 58, 32, 34, 120, 34, 44, 32, 32, 34, 110, 34, 58, 32, 49, 101, 51, 125]), Bytes([10])]
            5 30s in [Bytes([123, 98, 114, 111, 107, 101, 110])]
            6 30s in [Bytes([255]), Bytes([10])]
            7 30s in [Bytes([123]), Repeat("x", 3), Bytes([10])]
            8 30s Expected { pattern: Object([("type", Exactly(Text("rpc"))), ("sid", Exactly(Text("s1"))), ("message", Object([("jsonrpc", Exactly(Text("2.0"))), ("method", Exactly(Text("event"))), ("params", Object([("type", Exactly(Text("message.start"))), ("session_id", Exactly(Text("s1"))), ("payload", Absent)]))]))]), exact: false, optional: true }
            9 30s Deltas(Deltas { sid: "s1", kind: "message.delta", text: Some("a b") })
            10 30s Deltas(Deltas { sid: "s1", kind: "reasoning.delta", text: None })
            11 30s Signal("Signal::TERM")
            12 30s CloseStdin
            13 30s ParentDies
            14 30s Pause(7ms)
            15 30s Differs("words")
            16 30s Exit(Signal(9))
            17 30s Cut
        "#]]
        .assert_eq(&verbs.concat());
        assert_eq!(fixture.host.args, ["--workers", "2"]);
        assert!(fixture.has_mortal_parent());
        assert_eq!(fixture.name(), "a");
    }

    #[test]
    fn ids_go_into_what_is_sent() {
        let fixture = parse(
            r#"{"out": {"type": "rpc", "message": {"id": "<id:q>"}}}
{"in": {"id":"<id:q>"}}
{"exit": 0}"#,
        )
        .unwrap();
        let Verb::In(pieces) = &fixture.lines[1].verb else {
            panic!("an in line")
        };
        let bytes = |text: &str| Piece::Bytes(text.into());
        let expected = [
            bytes(r#"{"id":""#),
            Piece::Id("q".to_owned()),
            bytes(r#""}"#),
            bytes("\n"),
        ];
        assert_eq!(*pieces, expected);
    }

    #[test]
    fn a_bad_line_is_named_with_what_is_allowed() {
        check("{\"exit\": 0}", expect!["good"]);
        check(
            "",
            expect![[r#"a.jsonl:1: the last line has to be an exit, such as {"exit": 0}"#]],
        );
        check(
            "{\"pause_ms\": 1}\n\n",
            expect![[r#"a.jsonl:1: the last line has to be an exit, such as {"exit": 0}"#]],
        );
        check(
            "\n{\"exit\": 0}\n{\"pause_ms\": 1}",
            expect!["a.jsonl:3: nothing but cut and differs may follow the exit"],
        );
        check(
            "{\"exit\": 0, \"within\": 3}",
            expect![
                "a.jsonl:1: unknown field `within`, expected one of `why`, `within_ms`, `exact`, `optional`, `lf`, `script`, `host`, `in`, `in_text`, `in_base64`, `in_parts`, `out`, `event`, `deltas`, `signal`, `close`, `parent_dies`, `pause_ms`, `exit`, `cut`, `differs` (column 20)"
            ],
        );
        check(
            "{\"exit\": 0",
            expect!["a.jsonl:1: EOF while parsing an object (column 10)"],
        );
        check(
            "{\"exit\": \"NOVA\"}",
            expect![
                "a.jsonl:1: unknown signal NOVA; allowed: TERM, INT, HUP, QUIT, KILL, STOP, CONT, ABRT, SEGV, BUS, ILL, FPE, PIPE, USR1, USR2"
            ],
        );
        check(
            "{\"why\": \"nothing\"}",
            expect![
                "a.jsonl:1: a line has one verb, this one has 0; verbs: host, in, in_text, in_base64, in_parts, out, event, deltas, signal, close, parent_dies, pause_ms, exit, cut, differs"
            ],
        );
        check(
            "{\"exit\": 0, \"pause_ms\": 1}",
            expect![
                "a.jsonl:1: a line has one verb, this one has 2; verbs: host, in, in_text, in_base64, in_parts, out, event, deltas, signal, close, parent_dies, pause_ms, exit, cut, differs"
            ],
        );
        check(
            "{\"pause_ms\": 0}\n{\"host\": {}}",
            expect!["a.jsonl:2: host has to be the first line"],
        );
        check(
            "{\"host\": {\"arg\": []}}",
            expect!["a.jsonl:1: unknown field `arg`, expected `args` or `env` (column 15)"],
        );
        check(
            "{\"pause_ms\": 1, \"script\": {}}",
            expect!["a.jsonl:1: script belongs to the line of the host"],
        );
        check(
            "{\"pause_ms\": 1, \"within_ms\": 1}",
            expect!["a.jsonl:1: within_ms goes only with out, event, deltas or exit"],
        );
        check(
            "{\"in\": {}, \"exact\": true}",
            expect!["a.jsonl:1: exact goes only with out or event"],
        );
        check(
            "{\"in\": {}, \"lf\": false}",
            expect!["a.jsonl:1: lf goes only with in_text, in_base64 or in_parts"],
        );
        check(
            "{\"in\": {\"id\": \"<id:q>\"}}",
            expect!["a.jsonl:1: <id:q> has no value: no out line above names it"],
        );
        check(
            "{\"in_base64\": \"?\"}",
            expect!["a.jsonl:1: in_base64: Invalid symbol 63, offset 0."],
        );
        check(
            "{\"in_parts\": [{\"repeat\": \"ab\", \"count\": 999999999}]}",
            expect!["a.jsonl:1: in_parts: 1999999998 bytes; allowed are 1073741824"],
        );
        check(
            "{\"out\": {\"sid\": \"s1\"}}",
            expect!["a.jsonl:1: out: the frame needs its type, as text"],
        );
        check(
            "{\"out\": {\"type\": \"hello\", \"host_pid\": \"<id>\"}}",
            expect![
                "a.jsonl:1: unknown placeholder <id>; allowed: <any>, <bool>, <hex32>, <ns>, <number>, <path>, <pid>, <seq>, <text>, <absent>, <id:NAME>, <literal TEXT> for a text as it stands, or a text with <any> in it"
            ],
        );
        check(
            "{\"deltas\": {\"sid\": \"s1\", \"type\": \"session.info\", \"text\": \"\"}}",
            expect!["a.jsonl:1: deltas: session.info is no type of deltas, such as message.delta"],
        );
        check(
            "{\"deltas\": {\"sid\": \"s1\", \"text\": \"<ns>\"}}",
            expect!["a.jsonl:1: deltas: text is the joined text or <any>"],
        );
        check(
            "{\"close\": \"stdout\"}",
            expect!["a.jsonl:1: unknown variant `stdout`, expected `stdin` (column 18)"],
        );
        check(
            "{\"parent_dies\": true}",
            expect!["a.jsonl:1: parent_dies needs the hello before it, which names the host"],
        );
    }

    #[test]
    fn a_missing_file_is_named() {
        let error = Fixture::read(Path::new("/no/such.jsonl"))
            .unwrap_err()
            .to_string();
        expect!["/no/such.jsonl: cannot read the fixture: No such file or directory (os error 2)"]
            .assert_eq(&error);
    }
}
