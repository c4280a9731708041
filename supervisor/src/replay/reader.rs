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
use super::json::{Fields, Json};
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

/// Each verb with the options that go with it; `why` goes with all.
const VERBS: [(&str, &[&str]); 15] = [
    ("host", &["script"]),
    ("in", &[]),
    ("in_text", &["lf"]),
    ("in_base64", &["lf"]),
    ("in_parts", &["lf"]),
    ("out", &["exact", "optional", "within_ms"]),
    ("event", &["exact", "optional", "within_ms"]),
    ("deltas", &["within_ms"]),
    ("signal", &[]),
    ("close", &[]),
    ("parent_dies", &[]),
    ("pause_ms", &[]),
    ("exit", &["within_ms"]),
    ("cut", &[]),
    ("differs", &[]),
];

/// A line as it stands in the file: one verb, and what goes with it.
struct Written<'a> {
    verb: &'static str,
    value: &'a RawValue,
    options: Vec<(String, &'a RawValue)>,
}

impl<'a> Written<'a> {
    fn read(text: &'a str) -> Result<Self, String> {
        let Fields(mut fields) = serde_json::from_str(text)
            .map_err(|error| format!("{} (column {})", told(&error), error.column()))?;
        let verb_of = |name: &str| VERBS.iter().find(|(verb, _)| *verb == name);
        let verbs: Vec<_> = (0..fields.len())
            .filter(|at| verb_of(&fields[*at].0).is_some())
            .collect();
        let [at] = verbs[..] else {
            let all: Vec<_> = VERBS.iter().map(|(verb, _)| *verb).collect();
            let keys: Vec<_> = fields.iter().map(|(name, _)| name.as_str()).collect();
            return Err(format!(
                "a line has one verb, this one has {} (its keys: {}); verbs: {}",
                verbs.len(),
                if keys.is_empty() {
                    "none".to_owned()
                } else {
                    keys.join(", ")
                },
                all.join(", ")
            ));
        };
        let (name, value) = fields.remove(at);
        let (verb, allowed) = verb_of(&name).copied().unwrap_or_default();
        for (index, (option, _)) in fields.iter().enumerate() {
            if option != "why" && !allowed.contains(&option.as_str()) {
                let allowed = [allowed, ["why"].as_slice()].concat().join(", ");
                return Err(format!(
                    "unknown key {option}; allowed beside {verb}: {allowed}"
                ));
            }
            if fields[..index].iter().any(|(earlier, _)| earlier == option) {
                return Err(format!("{option} stands there twice"));
            }
        }
        Ok(Self {
            verb,
            value,
            options: fields,
        })
    }

    /// What the verb says.
    fn value<T: Deserialize<'a>>(&self) -> Result<T, String> {
        read(self.verb, self.value)
    }

    /// What the option `name` says, if it is there.
    fn option<T: Deserialize<'a>>(&self, name: &str) -> Result<Option<T>, String> {
        let found = self.options.iter().find(|(option, _)| option == name);
        found.map(|(_, value)| read(name, value)).transpose()
    }
}

/// Reads the value that stands under `name`.
fn read<'a, T: Deserialize<'a>>(name: &str, value: &'a RawValue) -> Result<T, String> {
    serde_json::from_str(value.get()).map_err(|error| format!("{name}: {}", told(&error)))
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
#[serde(
    untagged,
    expecting = r#"expected text or {"repeat": "x", "count": 2}"#
)]
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
#[serde(untagged, expecting = "expected an exit code or the name of a signal")]
enum WrittenExit {
    Code(i32),
    Signal(String),
}

impl Reader {
    /// Takes in line `number`, which holds `text`.
    pub(super) fn line(&mut self, number: usize, text: &str) -> Result<(), String> {
        let written = Written::read(text)?;
        written.option::<String>("why")?;
        let first = !std::mem::replace(&mut self.begun, true);
        if written.verb == "host" {
            return if first {
                self.host = host(&written)?;
                Ok(())
            } else {
                Err("host has to be the first line".to_owned())
            };
        }
        let within = written
            .option("within_ms")?
            .map_or(WITHIN, Duration::from_millis);
        let verb = self.verb(&written)?;
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
        Ok(())
    }

    fn verb(&mut self, written: &Written<'_>) -> Result<Verb, String> {
        let line_end = || Ok::<_, String>(written.option("lf")?.unwrap_or(true));
        Ok(match written.verb {
            "in" => Verb::In(with_line_end(self.with_ids(written.value.get())?, true)),
            "in_text" => {
                let text: String = written.value()?;
                Verb::In(with_line_end(self.with_ids(&text)?, line_end()?))
            }
            "in_base64" => {
                let bytes = BASE64.decode(written.value::<String>()?);
                let bytes = bytes.map_err(|error| format!("in_base64: {error}"))?;
                Verb::In(with_line_end(vec![Piece::Bytes(bytes)], line_end()?))
            }
            "in_parts" => Verb::In(with_line_end(pieces(written.value()?)?, line_end()?)),
            "out" => {
                let frame = Json::parse(written.value.get()).map_err(|error| told(&error))?;
                Verb::Out(self.expected(frame, written)?)
            }
            "event" => {
                let event: WrittenEvent = written.value()?;
                let frame = event.frame().map_err(|error| told(&error))?;
                Verb::Out(self.expected(frame, written)?)
            }
            "deltas" => Verb::Deltas(deltas(written.value()?)?),
            "signal" => Verb::Signal(signal(&written.value::<String>()?)?),
            "close" => {
                let WrittenStream::Stdin = written.value()?;
                Verb::CloseStdin
            }
            "parent_dies" if !written.value()? => {
                return Err("parent_dies: the only value is true".to_owned());
            }
            "parent_dies" if !self.hello => {
                return Err(
                    "parent_dies needs the hello before it, which names the host".to_owned(),
                );
            }
            "parent_dies" => Verb::ParentDies,
            "pause_ms" => Verb::Pause(Duration::from_millis(written.value()?)),
            "exit" => Verb::Exit(match written.value()? {
                WrittenExit::Code(code) => Exit::Code(code),
                WrittenExit::Signal(name) => Exit::Signal(signal(&name)?.as_raw()),
            }),
            "cut" => {
                written.value::<String>()?;
                Verb::Cut
            }
            _ => Verb::Differs(written.value()?),
        })
    }

    fn expected(&mut self, frame: Json, written: &Written<'_>) -> Result<Expected, String> {
        let exact = written.option("exact")?.unwrap_or(false);
        let optional = written.option("optional")?.unwrap_or(false);
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
    fn with_ids(&self, text: &str) -> Result<Vec<Piece>, String> {
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
        Ok(pieces)
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

fn host(written: &Written<'_>) -> Result<HostSetup, String> {
    let WrittenHost { args, env } = written.value()?;
    let script = written.option::<Box<RawValue>>("script")?;
    Ok(HostSetup { args, env, script })
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

/// What `error` says, without the place: that counts within the text that was read.
fn told(error: &serde_json::Error) -> String {
    let text = error.to_string();
    text.rsplit_once(" at line ")
        .map_or(text.as_str(), |(problem, _)| problem)
        .to_owned()
}
