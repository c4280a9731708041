//! The JSON-RPC messages inside `rpc` frames: events, activity, and requests to the person.

use std::borrow::Cow;
use std::collections::BTreeMap;

use serde::ser::SerializeMap;
use serde::{Serialize, Serializer};
use serde_json::value::RawValue;

/// What models cost so far: sums over a session.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Usage {
    /// Name of the model.
    pub model: String,
    /// Tokens read.
    pub input: u64,
    /// Tokens written.
    pub output: u64,
    /// Tokens written that are reasoning.
    pub reasoning: u64,
    /// Both together.
    pub total: u64,
    /// Calls of the model.
    pub calls: u64,
}

/// The state of a session as gateways show it.
#[derive(Debug, Clone, Serialize)]
pub struct SessionInfo {
    /// Name of the model.
    pub model: String,
    /// Where tools run.
    pub cwd: String,
    /// Whether a turn is live.
    pub running: bool,
    /// Title of the conversation.
    pub title: String,
    /// The `session_key`.
    pub stored_session_id: String,
    /// What models cost so far.
    pub usage: Usage,
    /// Name of the personality, or empty.
    pub personality: String,
    /// Tools by toolset.
    pub tools: BTreeMap<String, Vec<String>>,
    /// Configured tool servers and their state.
    pub mcp_servers: Vec<Box<RawValue>>,
    /// Name of the profile.
    pub profile_name: String,
    /// Version of the host.
    pub version: &'static str,
}

/// How a message ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Status {
    /// The agent finished.
    Complete,
    /// The model server failed.
    Error,
    /// A person stopped it.
    Interrupted,
}

/// An event of a session: SPEC §4. Serializes as its payload.
#[derive(Debug, Clone, Serialize)]
#[serde(untagged)]
#[allow(missing_docs, reason = "the names are those of SPEC §4")]
pub enum Event<'a> {
    SessionInfo(Box<Cow<'a, SessionInfo>>),
    MessageStart,
    MessageDelta {
        text: Cow<'a, str>,
    },
    ReasoningDelta {
        text: Cow<'a, str>,
    },
    MessageInterim {
        text: Cow<'a, str>,
        already_streamed: bool,
    },
    MessageComplete(MessageComplete<'a>),
    ToolStart(ToolStart<'a>),
    ToolComplete(ToolComplete<'a>),
    StatusUpdate {
        kind: &'a str,
        text: Cow<'a, str>,
    },
    SessionTitle {
        #[serde(rename = "session_id")]
        session_key: &'a str,
        title: &'a str,
    },
    RequestCancel {
        id: &'a str,
        method: &'a str,
        reason: &'a str,
    },
    Error {
        message: Cow<'a, str>,
        #[serde(skip_serializing_if = "Option::is_none")]
        reason: Option<&'a str>,
    },
}

/// Payload of `message.complete`.
#[derive(Debug, Clone, Serialize)]
pub struct MessageComplete<'a> {
    /// The final text.
    pub text: Cow<'a, str>,
    /// How it ended.
    pub status: Status,
    /// What models cost so far.
    pub usage: &'a Usage,
    /// What failed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<&'a str>,
    /// Where it failed, and whether a retry can help.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error_surface: Option<&'a RawValue>,
    /// True when the text is what was streamed before it ended early.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub partial: bool,
    /// True when the text was too long to be repeated here whole.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub truncated: bool,
}

/// Payload of `tool.start`.
#[derive(Debug, Clone, Serialize)]
pub struct ToolStart<'a> {
    /// The call.
    pub tool_id: &'a str,
    /// The tool.
    pub name: &'a str,
    /// What it is called with.
    pub args: &'a RawValue,
    /// True when the arguments were too long to be shown; the tool gets them all.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub truncated: bool,
}

/// Payload of `tool.complete`.
#[derive(Debug, Clone, Serialize)]
pub struct ToolComplete<'a> {
    /// The call.
    pub tool_id: &'a str,
    /// The tool.
    pub name: &'a str,
    /// What it was called with.
    pub args: &'a RawValue,
    /// What it answered.
    pub result: &'a RawValue,
    /// How long it ran, in seconds.
    pub duration_s: f64,
    /// Whether the result is a failure.
    pub is_error: bool,
    /// True when the result was too long to be shown whole; the agent got it all.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub truncated: bool,
}

impl Event<'_> {
    /// Its `type`.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        match self {
            Self::SessionInfo(_) => "session.info",
            Self::MessageStart => "message.start",
            Self::MessageDelta { .. } => "message.delta",
            Self::ReasoningDelta { .. } => "reasoning.delta",
            Self::MessageInterim { .. } => "message.interim",
            Self::MessageComplete(_) => "message.complete",
            Self::ToolStart(_) => "tool.start",
            Self::ToolComplete(_) => "tool.complete",
            Self::StatusUpdate { .. } => "status.update",
            Self::SessionTitle { .. } => "session.title",
            Self::RequestCancel { .. } => "request.cancel",
            Self::Error { .. } => "error",
        }
    }

    /// The same with its text or result shorter by `bytes` or more, marked as cut where the
    /// payload has a mark. Events without either stay as they are.
    #[must_use]
    pub fn shorter(mut self, bytes: usize) -> Self {
        match &mut self {
            Self::MessageComplete(complete) => {
                cut(complete.text.to_mut(), bytes + TRUNCATED_FIELD);
                complete.truncated = true;
            }
            Self::ToolStart(start) => {
                start.args = RawValue::NULL;
                start.truncated = true;
            }
            Self::ToolComplete(complete) => {
                // The result goes first; what it was called with was shown at the start.
                let result_bytes = complete.result.get().len();
                complete.result = RawValue::NULL;
                if result_bytes < bytes + TRUNCATED_FIELD {
                    complete.args = RawValue::NULL;
                }
                complete.truncated = true;
            }
            Self::SessionInfo(info) => {
                let info = info.to_mut();
                info.tools.clear();
                info.mcp_servers.clear();
                cut(&mut info.title, bytes);
                cut(&mut info.cwd, bytes);
            }
            Self::MessageDelta { text }
            | Self::ReasoningDelta { text }
            | Self::MessageInterim { text, .. }
            | Self::StatusUpdate { text, .. }
            | Self::Error { message: text, .. } => cut(text.to_mut(), bytes),
            Self::MessageStart | Self::SessionTitle { .. } | Self::RequestCancel { .. } => {}
        }
        self
    }
}

/// `,"truncated":true`
const TRUNCATED_FIELD: usize = 17;

/// Takes at least `bytes` from the end of `text`, as far as it has them, and says so in it.
pub(crate) fn cut(text: &mut String, bytes: usize) {
    const MARK: &str = "… [cut]";
    if text.is_empty() {
        return;
    }
    let kept = crate::json::prefix(text, text.len().saturating_sub(bytes + MARK.len())).len();
    text.truncate(kept);
    text.push_str(MARK);
}

/// A JSON-RPC 2.0 message for the gateway.
#[derive(Debug, Clone)]
pub enum Message<'a> {
    /// A notification `event`.
    Event {
        /// The session.
        sid: &'a str,
        /// What happened.
        event: Event<'a>,
        /// Counts up by one in each session of one host.
        seq: u64,
    },
    /// A notification `event` of a supervisor: it belongs to no host, so it has no `seq`.
    SupervisorEvent {
        /// The session.
        sid: &'a str,
        /// What happened.
        event: Event<'a>,
    },
    /// A notification `compute_host.activity`.
    Activity {
        /// The session.
        sid: &'a str,
        /// The turn.
        turn_id: &'a str,
        /// When its agent last made progress, on CLOCK_MONOTONIC in nanoseconds.
        activity_ns: Option<u64>,
    },
    /// A request to the person.
    Request {
        /// `srq-` and 12 hex digits.
        id: &'a str,
        /// `clarify`, `approval`, `sudo` or `secret`.
        method: &'a str,
        /// Its params, checked.
        params: &'a RawValue,
    },
}

impl Message<'_> {
    /// The same with less text, where it has text that may be cut: [`Event::shorter`].
    #[must_use]
    pub fn shorter(self, bytes: usize) -> Self {
        match self {
            Self::Event { sid, event, seq } => Self::Event {
                sid,
                event: event.shorter(bytes),
                seq,
            },
            Self::SupervisorEvent { sid, event } => Self::SupervisorEvent {
                sid,
                event: event.shorter(bytes),
            },
            other => other,
        }
    }
}

impl Serialize for Message<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut message = serializer.serialize_map(None)?;
        message.serialize_entry("jsonrpc", "2.0")?;
        match self {
            Self::Event { sid, event, seq } => {
                message.serialize_entry("method", "event")?;
                message.serialize_entry(
                    "params",
                    &EventParams {
                        sid,
                        event,
                        seq: Some(*seq),
                    },
                )?;
            }
            Self::SupervisorEvent { sid, event } => {
                message.serialize_entry("method", "event")?;
                let seq = None;
                message.serialize_entry("params", &EventParams { sid, event, seq })?;
            }
            Self::Activity {
                sid,
                turn_id,
                activity_ns,
            } => {
                message.serialize_entry("method", "compute_host.activity")?;
                message.serialize_entry(
                    "params",
                    &ActivityParams {
                        session_id: sid,
                        turn_id,
                        activity_ns: *activity_ns,
                    },
                )?;
            }
            Self::Request { id, method, params } => {
                message.serialize_entry("id", id)?;
                message.serialize_entry("method", method)?;
                message.serialize_entry("params", params)?;
            }
        }
        message.end()
    }
}

#[derive(Serialize)]
struct ActivityParams<'a> {
    session_id: &'a str,
    turn_id: &'a str,
    activity_ns: Option<u64>,
}

struct EventParams<'a> {
    sid: &'a str,
    event: &'a Event<'a>,
    seq: Option<u64>,
}

impl Serialize for EventParams<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut params = serializer.serialize_map(None)?;
        params.serialize_entry("type", self.event.kind())?;
        params.serialize_entry("session_id", self.sid)?;
        if !matches!(self.event, Event::MessageStart) {
            params.serialize_entry("payload", self.event)?;
        }
        if let Some(seq) = self.seq {
            params.serialize_entry("seq", &seq)?;
        }
        params.end()
    }
}
