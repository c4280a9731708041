//! The frames into the host: SPEC §3.

use std::borrow::Cow;
use std::path::PathBuf;

use serde_json::value::RawValue;

use super::fields::{Field, Fields, InvalidField, text_of};
use crate::json;

/// A frame into the host, checked.
#[derive(Debug)]
pub enum Input {
    /// Run a turn.
    TurnStart(Box<TurnStart>),
    /// Stop the turn of a session.
    Interrupt {
        /// The session.
        sid: String,
        /// Raises the session's generation.
        queued_prompt_generation: Option<i64>,
    },
    /// An answer of the person, or a lock, or a withdrawal.
    Respond {
        /// The session that asked.
        sid: String,
        /// `{frame}`, `{lock}`, `{cancel}`, or bare response fields; checked by its handler.
        params: Option<Box<RawValue>>,
    },
    /// One locked answer of a batch: `respond` with `{lock}`.
    ClarifyLock {
        /// The session that asked.
        sid: String,
        /// `{request_id, question_id, answer}`.
        params: Option<Box<RawValue>>,
    },
    /// List open requests.
    RequestsOpen {
        /// Only those of this session.
        sid: Option<String>,
    },
    /// Run a mutator route.
    Control(Box<Control>),
    /// Connect the tool servers again.
    ReloadMcp {
        /// The session, where one was named.
        sid: String,
    },
    /// List sessions.
    SessionList,
    /// Show a stored session under a `sid`.
    SessionResume {
        /// The new name of the session in this host.
        sid: String,
        /// Its durable name.
        session_key: Option<String>,
    },
    /// End a session.
    SessionClose {
        /// The session.
        sid: String,
    },
    /// Ask whether the host does nothing.
    IdleProbe,
    /// What the gateway says to `hello`; takes no answer.
    HelloAck,
    /// Drain and end.
    Shutdown {
        /// How long the drain may take, in milliseconds.
        wait_ms: Option<u64>,
    },
}

/// The prompt of a turn.
#[derive(Debug, Clone)]
pub enum Prompt {
    /// Plain text.
    Text(String),
    /// Content parts, untouched.
    Parts(Vec<Box<RawValue>>),
}

impl Prompt {
    /// The text of the prompt: that of its text parts, joined by line feeds.
    #[must_use]
    pub fn to_text(&self) -> String {
        match self {
            Self::Text(text) => text.clone(),
            Self::Parts(parts) => {
                let texts: Vec<String> = parts
                    .iter()
                    .filter_map(|part| {
                        let text = *json::members(part)?.get("text")?;
                        text_of(text).map(Cow::into_owned)
                    })
                    .collect();
                texts.join("\n")
            }
        }
    }
}

/// The lease of a session that its gateway holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SessionLease {
    /// Name of the lease.
    pub lease_id: String,
    /// The `session_key` that it is for.
    pub session_id: String,
}

/// A `turn.start`.
#[derive(Debug)]
#[allow(missing_docs, reason = "the names are those of SPEC §3")]
pub struct TurnStart {
    pub sid: String,
    pub session_key: Option<String>,
    pub prompt: Prompt,
    pub history: Option<Vec<Box<RawValue>>>,
    pub history_version: Option<u64>,
    pub replace_history: bool,
    pub cols: Option<u32>,
    pub cwd: Option<String>,
    pub context_cwd_is_launch_artifact: bool,
    pub profile_home: Option<PathBuf>,
    pub model_override: Option<Box<RawValue>>,
    pub reasoning_config_override: Option<Box<RawValue>>,
    pub service_tier_override: Option<String>,
    pub source: Option<String>,
    pub attached_images: Vec<PathBuf>,
    pub auth_user_id: Option<String>,
    pub queued_prompt_generation: Option<i64>,
    pub turn_id: Option<String>,
    pub display_kind: Option<String>,
    pub display_metadata: Option<Box<RawValue>>,
    pub active_session_lease: Option<SessionLease>,
    pub pending_model_switch: Option<Box<RawValue>>,
}

/// A `control`.
#[derive(Debug)]
pub struct Control {
    /// The session.
    pub sid: String,
    /// The route of SPEC §7.
    pub route_name: String,
    /// What the person typed, slash and all.
    pub command: String,
    /// The stored session, where `sid` alone does not tell.
    pub session_key: Option<String>,
    /// Where `prompt.submit.truncate` cuts: the index of a message.
    pub truncate_before: Option<u64>,
}

/// Why a frame cannot be handled.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// Its `type` is none of the contract's.
    #[error("unknown frame type: {0}")]
    UnknownType(String),
    /// A field is missing or of a wrong type.
    #[error(transparent)]
    Invalid(#[from] InvalidField),
}

/// Each frame type into the host.
pub const TYPES: [&str; 13] = [
    "turn.start",
    "interrupt",
    "respond",
    "clarify.lock",
    "requests.open",
    "control",
    "reload_mcp",
    "session.list",
    "session.resume",
    "session.close",
    "idle.probe",
    "hello.ack",
    "shutdown",
];

impl Input {
    /// The frame that `fields` are.
    ///
    /// A missing `sid` is given as the empty text: what it means is the handler's to say.
    ///
    /// # Errors
    /// An unknown `type`, or the field that is wrong.
    pub fn from_fields(fields: &Fields<'_>) -> Result<Self, Refused> {
        let sid = || Ok::<_, InvalidField>(fields.name(Field::Sid)?.unwrap_or_default());
        Ok(match &*fields.kind() {
            "turn.start" => Self::TurnStart(Box::new(TurnStart::from_fields(fields)?)),
            "interrupt" => Self::Interrupt {
                sid: sid()?,
                queued_prompt_generation: generation(fields)?,
            },
            "respond" => Self::Respond {
                sid: sid()?,
                params: params(fields),
            },
            "clarify.lock" => Self::ClarifyLock {
                sid: sid()?,
                params: params(fields),
            },
            "requests.open" => Self::RequestsOpen {
                sid: fields.name(Field::Sid)?,
            },
            "control" => Self::Control(Box::new(Control {
                sid: sid()?,
                route_name: fields.name(Field::RouteName)?.unwrap_or_default(),
                command: fields.name(Field::Command)?.unwrap_or_default(),
                session_key: fields.name(Field::SessionKey)?,
                truncate_before: fields.integer(Field::TruncateBefore, "the index of a message")?,
            })),
            "reload_mcp" => Self::ReloadMcp { sid: sid()? },
            "session.list" => Self::SessionList,
            "session.resume" => Self::SessionResume {
                sid: sid()?,
                session_key: fields.name(Field::SessionKey)?,
            },
            "session.close" => Self::SessionClose { sid: sid()? },
            "idle.probe" => Self::IdleProbe,
            "hello.ack" => Self::HelloAck,
            "shutdown" => Self::Shutdown {
                wait_ms: fields.integer(Field::WaitMs, "a number of milliseconds")?,
            },
            other => return Err(Refused::UnknownType(other.to_owned())),
        })
    }
}

impl TurnStart {
    fn from_fields(fields: &Fields<'_>) -> Result<Self, InvalidField> {
        let text = |field| Ok::<_, InvalidField>(fields.text(field)?.map(|text| text.into_owned()));
        Ok(Self {
            sid: fields.name(Field::Sid)?.unwrap_or_default(),
            session_key: fields.name(Field::SessionKey)?,
            prompt: prompt(fields)?,
            history: fields.history()?,
            history_version: fields.integer(Field::HistoryVersion, "a whole number, 0 or more")?,
            replace_history: fields.flag(Field::ReplaceHistory)?,
            cols: fields.integer(Field::Cols, "a number of columns")?,
            cwd: text(Field::Cwd)?,
            context_cwd_is_launch_artifact: fields.flag(Field::ContextCwdIsLaunchArtifact)?,
            profile_home: text(Field::ProfileHome)?.map(PathBuf::from),
            model_override: fields.text_or_object(Field::ModelOverride)?,
            reasoning_config_override: fields.text_or_object(Field::ReasoningConfigOverride)?,
            service_tier_override: text(Field::ServiceTierOverride)?,
            source: text(Field::Source)?,
            attached_images: fields
                .texts(Field::AttachedImages)?
                .into_iter()
                .map(PathBuf::from)
                .collect(),
            auth_user_id: text(Field::AuthUserId)?,
            queued_prompt_generation: generation(fields)?,
            turn_id: fields.short_text(Field::TurnId)?,
            display_kind: text(Field::DisplayKind)?,
            display_metadata: fields.object(Field::DisplayMetadata)?,
            active_session_lease: session_lease(fields)?,
            pending_model_switch: fields.text_or_object(Field::PendingModelSwitch)?,
        })
    }
}

fn generation(fields: &Fields<'_>) -> Result<Option<i64>, InvalidField> {
    fields.integer(Field::QueuedPromptGeneration, "a whole number")
}

fn params(fields: &Fields<'_>) -> Option<Box<RawValue>> {
    fields.raw(Field::Params).map(json::on_one_line)
}

/// `text`, else `prompt`; a turn without either has an empty prompt.
fn prompt(fields: &Fields<'_>) -> Result<Prompt, InvalidField> {
    const EXPECTED: &str = "text or a list of content parts";
    if let Some(text) = fields.text(Field::Text)? {
        return Ok(Prompt::Text(text.into_owned()));
    }
    let Some(raw) = fields.raw(Field::Prompt) else {
        return Ok(Prompt::Text(String::new()));
    };
    if let Some(text) = text_of(raw) {
        return Ok(Prompt::Text(text.into_owned()));
    }
    let parts: Vec<&RawValue> = serde_json::from_str(raw.get())
        .map_err(|_| InvalidField::new(Field::Prompt.name(), EXPECTED))?;
    if let Some(index) = parts.iter().position(|part| !part.get().starts_with('{')) {
        return Err(InvalidField::new(
            format!("prompt[{index}]"),
            "a content part (an object)",
        ));
    }
    Ok(Prompt::Parts(
        parts.into_iter().map(json::on_one_line).collect(),
    ))
}

fn session_lease(fields: &Fields<'_>) -> Result<Option<SessionLease>, InvalidField> {
    let Some(raw) = fields.raw(Field::ActiveSessionLease) else {
        return Ok(None);
    };
    let read = |raw| {
        let members = json::members(raw)?;
        let text = |name| text_of(members.get(name)?).map(Cow::into_owned);
        Some(SessionLease {
            lease_id: text("lease_id")?,
            session_id: text("session_id")?,
        })
    };
    let expected = "an object with the texts lease_id and session_id";
    read(raw).map(Some).ok_or(InvalidField::new(
        Field::ActiveSessionLease.name(),
        expected,
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits;

    fn parse(line: &str) -> Result<Input, String> {
        Input::from_fields(&Fields::parse(line, limits::MAX_FRAME_BYTES).unwrap())
            .map_err(|refused| refused.to_string())
    }

    #[test]
    fn every_type_is_known() {
        for kind in TYPES {
            assert!(parse(&format!(r#"{{"type":"{kind}"}}"#)).is_ok(), "{kind}");
        }
        for (line, shown) in [
            (r#"{"type":"no.such"}"#, "unknown frame type: no.such"),
            (r#"{"type":7}"#, "unknown frame type: 7"),
            (r#"{"type":null}"#, "unknown frame type: "),
            ("{}", "unknown frame type: "),
            (
                r#"{"type":["turn.start"]}"#,
                r#"unknown frame type: ["turn.start"]"#,
            ),
        ] {
            assert_eq!(parse(line).unwrap_err(), shown);
        }
    }

    #[test]
    fn each_wrong_type_names_its_field() {
        for (field, value, message) in [
            ("sid", "true", "sid must be text"),
            ("session_key", "[]", "session_key must be text"),
            ("text", r#"["not","text"]"#, "text must be text"),
            (
                "prompt",
                r#"["x"]"#,
                "prompt[0] must be a content part (an object)",
            ),
            (
                "prompt",
                "1",
                "prompt must be text or a list of content parts",
            ),
            (
                "history_version",
                "-1",
                "history_version must be a whole number, 0 or more",
            ),
            (
                "replace_history",
                r#""yes""#,
                "replace_history must be true or false",
            ),
            ("cols", r#""wide""#, "cols must be a number of columns"),
            ("cwd", "1", "cwd must be text"),
            ("profile_home", "{}", "profile_home must be text"),
            (
                "model_override",
                "1",
                "model_override must be text or an object",
            ),
            (
                "attached_images",
                "[1]",
                "attached_images must be a list of texts",
            ),
            (
                "queued_prompt_generation",
                r#""abc""#,
                "queued_prompt_generation must be a whole number",
            ),
            (
                "queued_prompt_generation",
                "1.5",
                "queued_prompt_generation must be a whole number",
            ),
            ("turn_id", "5", "turn_id must be text"),
            (
                "display_metadata",
                "[]",
                "display_metadata must be an object",
            ),
            (
                "active_session_lease",
                r#"["a","b"]"#,
                "active_session_lease must be an object with the texts lease_id and session_id",
            ),
        ] {
            let line = format!(r#"{{"type":"turn.start","{field}":{value}}}"#);
            assert_eq!(parse(&line).unwrap_err(), message);
        }
    }

    #[test]
    fn a_prompt_is_text_or_parts() {
        let text = |line: &str| match parse(line).unwrap() {
            Input::TurnStart(start) => start.prompt.to_text(),
            other => panic!("{other:?}"),
        };
        assert_eq!(text(r#"{"type":"turn.start","prompt":"a\n"}"#), "a\n");
        assert_eq!(
            text(r#"{"type":"turn.start","text":"t","prompt":"p"}"#),
            "t"
        );
        assert_eq!(text(r#"{"type":"turn.start","text":null}"#), "");
        let parts = r#"[{"type":"text","text":"x","text":"a"},{"type":"image_url"},{"text":"b"}]"#;
        assert_eq!(
            text(&format!(r#"{{"type":"turn.start","prompt":{parts}}}"#)),
            "a\nb"
        );
    }
}
