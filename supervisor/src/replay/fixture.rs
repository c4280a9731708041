//! A transcript as a file: JSON Lines, each an object with one verb; see `fixtures/README.md`.
//!
//! Reading is all or nothing: a fixture that is played has no bad line. Touches only the file that
//! it reads.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::process::Signal;
use serde_json::value::RawValue;

use super::pattern::Pattern;
use super::reader::Reader;

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

/// The signal that a fixture calls `name`.
pub(super) fn signal(name: &str) -> Result<Signal, String> {
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
            expect!["a.jsonl:1: unknown key within; allowed beside exit: within_ms, why"],
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
                "a.jsonl:1: a line has one verb, this one has 0 (its keys: why); verbs: host, in, in_text, in_base64, in_parts, out, event, deltas, signal, close, parent_dies, pause_ms, exit, cut, differs"
            ],
        );
        check(
            "{\"exit\": 0, \"pause_ms\": 1}",
            expect![
                "a.jsonl:1: a line has one verb, this one has 2 (its keys: exit, pause_ms); verbs: host, in, in_text, in_base64, in_parts, out, event, deltas, signal, close, parent_dies, pause_ms, exit, cut, differs"
            ],
        );
        check(
            "{\"pause_ms\": 0}\n{\"host\": {}}",
            expect!["a.jsonl:2: host has to be the first line"],
        );
        check(
            "{\"host\": {\"arg\": []}}",
            expect!["a.jsonl:1: host: unknown field `arg`, expected `args` or `env`"],
        );
        check(
            "{\"pause_ms\": 1, \"script\": {}}",
            expect!["a.jsonl:1: unknown key script; allowed beside pause_ms: why"],
        );
        check(
            "{\"pause_ms\": 1, \"within_ms\": 1}",
            expect!["a.jsonl:1: unknown key within_ms; allowed beside pause_ms: why"],
        );
        check(
            "{\"in\": {}, \"exact\": true}",
            expect!["a.jsonl:1: unknown key exact; allowed beside in: why"],
        );
        check(
            "{\"out\": {\"type\": \"hello\"}, \"optional\": true}",
            expect![
                "a.jsonl:1: optional needs a frame with an order, so one of rpc, turn.started, turn.end, turn.error with its sid"
            ],
        );
        check(
            "{\"in\": {}, \"lf\": false}",
            expect!["a.jsonl:1: unknown key lf; allowed beside in: why"],
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
            expect!["a.jsonl:1: close: unknown variant `stdout`, expected `stdin`"],
        );
        check(
            "{\"exit\": []}",
            expect!["a.jsonl:1: exit: expected an exit code or the name of a signal"],
        );
        check(
            "{\"in_parts\": [\"a\", {\"repeat\": \"b\"}]}",
            expect![[r#"a.jsonl:1: in_parts: expected text or {"repeat": "x", "count": 2}"#]],
        );
        check(
            "{\"parent_dies\": true}",
            expect!["a.jsonl:1: parent_dies needs the hello before it, which names the host"],
        );
        check(
            "{\"exit\": 0, \"within_ms\": \"long\"}",
            expect![[r#"a.jsonl:1: within_ms: invalid type: string "long", expected u64"#]],
        );
        check(
            "{\"exit\": 0, \"why\": \"a\", \"why\": \"b\"}",
            expect!["a.jsonl:1: why stands there twice"],
        );
        check(
            "[]",
            expect!["a.jsonl:1: invalid type: sequence, expected an object (column 0)"],
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
