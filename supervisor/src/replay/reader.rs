//! Reads the lines of a fixture: what stands in the file becomes what is played.
//!
//! Each problem is told in words that say what is allowed; the caller adds file and line. Pure.

use std::collections::{BTreeMap, HashSet};
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use serde::Deserialize;
use serde_json::value::RawValue;
use turnhost_protocol::json::quoted;
use turnhost_protocol::limits::{MAX_MAX_FRAME_BYTES, MAX_QUOTED_BYTES};

use super::fixture::{Deltas, Exit, Expected, HostSetup, Line, Piece, Verb, signal};
use super::json::Json;
use super::pattern::{Kind, Pattern, find_id};

/// How long one line waits for what it expects when it says nothing else.
const WITHIN: Duration = Duration::from_secs(30);

/// Frames that have their place in a session's order.
const SESSION_FRAMES: [&str; 4] = ["rpc", "turn.started", "turn.end", "turn.error"];

/// What the lines so far have said.
#[derive(Default)]
pub(super) struct Reader {
    pub(super) host: HostSetup,
    pub(super) lines: Vec<Line>,
    begun: bool,
    /// An exit was read, which each fixture needs.
    pub(super) ended: bool,
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
    /// Takes in line `number`, which holds `text`.
    pub(super) fn line(&mut self, number: usize, text: &str) -> Result<(), String> {
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
        if optional && !(pattern.text("sid").is_some() && SESSION_FRAMES.contains(&kind)) {
            return Err(format!(
                "optional needs a frame with an order, so one of {} with its sid",
                SESSION_FRAMES.join(", ")
            ));
        }
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
        Pattern::Of(Kind::Any) => Ok(Deltas {
            sid,
            kind,
            text: None,
        }),
        _ => Err("deltas: text is the joined text or <any>".to_owned()),
    }
}

/// `error` without its line number, which counts within the one line that was read.
fn told(error: &serde_json::Error) -> String {
    let text = error.to_string();
    match text.rsplit_once(" at line ") {
        Some((problem, _)) => format!("{problem} (column {})", error.column()),
        None => text,
    }
}
