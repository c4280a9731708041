//! The frames out of the host: SPEC §4, and those that the supervisor adds: SPEC §9.

use std::borrow::Cow;
use std::io::Write;
use std::path::Path;

use serde::Serialize;
use serde_json::value::RawValue;

use super::RequestId;
use crate::idle::Verdict;
use crate::process::monotonic_ns;
use crate::rpc::{Message, SessionInfo, Usage, cut};

/// Why a turn ended with an error: SPEC §4.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
#[allow(missing_docs, reason = "the names are those of SPEC §4")]
pub enum Reason {
    Busy,
    Invalid,
    Exception,
    Panic,
    Crash,
    Capacity,
    Draining,
    Store,
    Owned,
}

impl Reason {
    /// The name on the wire.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Busy => "busy",
            Self::Invalid => "invalid",
            Self::Exception => "exception",
            Self::Panic => "panic",
            Self::Crash => "crash",
            Self::Capacity => "capacity",
            Self::Draining => "draining",
            Self::Store => "store",
            Self::Owned => "owned",
        }
    }
}

/// Whether a part of a failed turn may have run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ExecutionState {
    /// It is certain that no part of it ran.
    NotStarted,
    /// Parts of it may have run.
    Unknown,
}

/// Code of an `error` about a line: SPEC §2.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ErrorCode {
    /// Not UTF-8, or not JSON.
    InvalidJson,
    /// Not an object, or a field of a wrong type.
    InvalidFrame,
    /// Longer than the limit.
    FrameTooLarge,
    /// A type that this host does not know.
    UnknownType,
    /// A type whose handler this version of the host does not have.
    Unsupported,
    /// No such session.
    NotFound,
    /// The host ended, or none runs, before the answer: only from a supervisor.
    HostGone,
    /// Too much waits for a host already: only from a supervisor.
    Capacity,
}

/// First frame of a host.
#[derive(Debug, Clone, Serialize)]
#[allow(missing_docs, reason = "the names are those of SPEC §4")]
pub struct Hello<'a> {
    pub host_pid: u32,
    pub boot_id: &'a str,
    pub build_sha: &'a str,
    pub version: &'a str,
    pub cwd: Cow<'a, str>,
    pub hermes_home: Cow<'a, str>,
    pub home: Cow<'a, str>,
    pub protocol_version: u32,
    pub capabilities: &'a [&'a str],
    pub workers: usize,
    pub heartbeat_secs: serde_json::Number,
}

/// What a host does, for `hb`.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Heartbeat {
    /// Turns that a worker has taken, computing or waiting.
    pub active_turns: usize,
    /// Of those, the ones that wait for a person.
    pub waiting_turns: usize,
    /// Turns that wait for a worker.
    pub queued_turns: usize,
    /// Questions without an answer.
    pub open_requests: usize,
    /// Sessions in memory.
    pub sessions: usize,
    /// Turns that ended since the start.
    pub progress_counter: u64,
    /// Memory in RAM, in MiB.
    pub rss_mb: f64,
}

/// A `turn.end`.
#[derive(Debug, Clone, Serialize)]
#[allow(missing_docs, reason = "the names are those of SPEC §4")]
pub struct TurnEnd<'a> {
    pub sid: &'a str,
    pub request_id: &'a RequestId,
    pub session_key: &'a str,
    pub history_version: u64,
    pub message_count: usize,
    pub interrupted: bool,
    pub ended_ns: u64,
    /// Left out only where it would make the frame too long.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub session_info: Option<&'a SessionInfo>,
    pub session_info_emitted: bool,
    pub usage: &'a Usage,
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub truncated: bool,
}

/// A `turn.error`.
#[derive(Debug, Clone, Serialize)]
#[allow(missing_docs, reason = "the names are those of SPEC §4")]
pub struct TurnError<'a> {
    pub sid: &'a str,
    pub request_id: &'a RequestId,
    pub message: Cow<'a, str>,
    pub reason: Reason,
    pub execution_state: ExecutionState,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub code: Option<i64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub retry_after_ms: Option<u64>,
}

/// What a mutator route did, for `control.ack`.
#[derive(Debug, Clone, Serialize)]
#[allow(missing_docs, reason = "the names are those of SPEC §7")]
pub struct ControlAck<'a> {
    pub sid: &'a str,
    pub request_id: &'a RequestId,
    pub route_name: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub output: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub result: Option<&'a RawValue>,
    pub session_key: &'a str,
    pub history_version: u64,
    pub message_count: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub messages: Option<&'a RawValue>,
    pub session_info: &'a SessionInfo,
}

/// A line of `session.list.ack`.
#[derive(Debug, Clone, Serialize)]
#[allow(missing_docs, reason = "the names are those of SPEC §3")]
pub struct SessionLine {
    pub session_key: String,
    pub sid: Option<String>,
    pub state: &'static str,
    pub message_count: usize,
    /// Seconds since 1970.
    pub last_active: f64,
}

/// A frame out of the host, or out of its supervisor.
#[derive(Debug, Clone, Serialize)]
#[serde(tag = "type")]
#[allow(missing_docs, reason = "the names are those of SPEC §4")]
pub enum Output<'a> {
    #[serde(rename = "hello")]
    Hello(Hello<'a>),
    #[serde(rename = "hb")]
    Heartbeat(Heartbeat),
    #[serde(rename = "turn.accepted")]
    TurnAccepted {
        sid: &'a str,
        request_id: &'a RequestId,
        queued_turns: usize,
    },
    #[serde(rename = "turn.started")]
    TurnStarted {
        sid: &'a str,
        request_id: &'a RequestId,
        started_ns: u64,
    },
    #[serde(rename = "rpc")]
    Rpc { sid: &'a str, message: Message<'a> },
    #[serde(rename = "turn.end")]
    TurnEnd(TurnEnd<'a>),
    #[serde(rename = "turn.error")]
    TurnError(TurnError<'a>),
    #[serde(rename = "interrupt.ack")]
    InterruptAck {
        sid: &'a str,
        request_id: &'a RequestId,
        applied: bool,
        #[serde(skip_serializing_if = "Option::is_none")]
        applied_ns: Option<u64>,
    },
    #[serde(rename = "respond.ack")]
    RespondAck {
        sid: &'a str,
        request_id: &'a RequestId,
        response: &'a RawValue,
    },
    #[serde(rename = "respond.error")]
    RespondError {
        sid: &'a str,
        request_id: &'a RequestId,
        message: Cow<'a, str>,
    },
    #[serde(rename = "requests.open.ack")]
    RequestsOpenAck {
        #[serde(skip_serializing_if = "Option::is_none")]
        sid: Option<&'a str>,
        request_id: &'a RequestId,
        open_requests: &'a [&'a RawValue],
    },
    #[serde(rename = "control.ack")]
    ControlAck(ControlAck<'a>),
    #[serde(rename = "control.error")]
    ControlError {
        sid: &'a str,
        request_id: &'a RequestId,
        #[serde(skip_serializing_if = "Option::is_none")]
        route_name: Option<&'a str>,
        message: Cow<'a, str>,
    },
    #[serde(rename = "reload_mcp.ack")]
    ReloadMcpAck {
        sid: &'a str,
        request_id: &'a RequestId,
        response: &'a RawValue,
    },
    #[serde(rename = "session.list.ack")]
    SessionListAck {
        request_id: &'a RequestId,
        sessions: &'a [SessionLine],
        #[serde(skip_serializing_if = "std::ops::Not::not")]
        truncated: bool,
    },
    #[serde(rename = "session.resume.ack")]
    SessionResumeAck {
        sid: &'a str,
        request_id: &'a RequestId,
        session_key: &'a str,
        messages: &'a [&'a RawValue],
        history_version: u64,
        open_requests: &'a [&'a RawValue],
        running: bool,
    },
    #[serde(rename = "session.close.ack")]
    SessionCloseAck {
        sid: &'a str,
        request_id: &'a RequestId,
    },
    #[serde(rename = "idle.verdict")]
    IdleVerdict {
        request_id: &'a RequestId,
        #[serde(flatten)]
        verdict: Verdict,
    },
    #[serde(rename = "shutdown.ack")]
    ShutdownAck { request_id: &'a RequestId },
    #[serde(rename = "orphan")]
    Orphan { old_ppid: i32, ppid: i32 },
    #[serde(rename = "error")]
    Error {
        #[serde(skip_serializing_if = "Option::is_none")]
        sid: Option<&'a str>,
        #[serde(skip_serializing_if = "Option::is_none")]
        request_id: Option<&'a RequestId>,
        message: Cow<'a, str>,
        code: ErrorCode,
    },
    /// Only from a supervisor.
    #[serde(rename = "host.exited")]
    HostExited {
        code: Option<i32>,
        signal: Option<i32>,
        will_retry: bool,
        delay_ms: u64,
        restarts_in_window: usize,
    },
    /// Only from a supervisor.
    #[serde(rename = "host.gave_up")]
    HostGaveUp { message: Cow<'a, str> },
}

/// `path` as a frame shows it; bytes that are no UTF-8 are replaced.
#[must_use]
pub fn shown(path: &Path) -> Cow<'_, str> {
    path.to_string_lossy()
}

impl Output<'_> {
    /// Appends the frame as one line to `into`. A frame of more than `max_bytes` (line end not
    /// counted) is cut where it has something to cut, and says so: SPEC §2.
    pub fn encode(&self, max_bytes: usize, into: &mut Vec<u8>) {
        let length = self.write_line(into);
        if length <= max_bytes {
            return;
        }
        let mut frame = self.clone();
        let mut length = length;
        // Each round takes at least what is too much, unless the frame has less to give.
        for _ in 0..MAX_CUTS {
            into.truncate(into.len() - (length + 1));
            frame = frame.shorter(length - max_bytes);
            length = frame.write_line(into);
            if length <= max_bytes {
                return;
            }
        }
    }

    /// Appends the frame; answers its bytes without the line end.
    fn write_line(&self, into: &mut Vec<u8>) -> usize {
        let start = into.len();
        // Writing into memory cannot fail, and neither can our own Serialize impls: every map key
        // and every path is text. Should one ever, the frame is left out rather than torn.
        if serde_json::to_writer(&mut *into, self).is_err() {
            into.truncate(start);
            return 0;
        }
        // Each frame is an object: its time goes before the closing brace.
        into.pop();
        into.extend_from_slice(b",\"host_ns\":");
        into.extend_from_slice(itoa::Buffer::new().format(monotonic_ns()).as_bytes());
        into.extend_from_slice(b"}\n");
        into.len() - start - 1
    }

    /// The same, shorter by at least `bytes` where it holds something that may be cut.
    fn shorter(mut self, bytes: usize) -> Self {
        match &mut self {
            Self::Rpc { message, .. } => *message = message.clone().shorter(bytes),
            Self::TurnEnd(end) => {
                end.session_info = None;
                end.truncated = true;
            }
            Self::TurnError(TurnError { message, .. })
            | Self::RespondError { message, .. }
            | Self::ControlError { message, .. }
            | Self::Error { message, .. } => cut(message.to_mut(), bytes),
            Self::Hello(hello) => {
                for path in [&mut hello.cwd, &mut hello.hermes_home, &mut hello.home] {
                    cut(path.to_mut(), bytes / 2);
                }
            }
            Self::SessionListAck {
                sessions,
                truncated,
                ..
            } => {
                *sessions = &sessions[..sessions.len() / 2];
                *truncated = true;
            }
            Self::IdleVerdict { verdict, .. } => {
                if let Some(Some(detail)) = &mut verdict.detail {
                    cut(detail, bytes);
                }
            }
            _ => {}
        }
        self
    }
}

/// How often a frame is cut before it goes out as it is. A list of sessions is halved each time.
const MAX_CUTS: usize = 24;

/// Appends a delta as one line: what [`Output::encode`] would write for it, with the head that is
/// the same for all deltas of a kind in a session made once by [`delta_head`].
pub fn encode_delta(head: &[u8], text: &str, seq: u64, into: &mut Vec<u8>) {
    into.extend_from_slice(head);
    // Text always serializes, and a vector takes it.
    let _ = serde_json::to_writer(&mut *into, text);
    let mut number = itoa::Buffer::new();
    into.extend_from_slice(b"},\"seq\":");
    into.extend_from_slice(number.format(seq).as_bytes());
    into.extend_from_slice(b"}},\"host_ns\":");
    into.extend_from_slice(number.format(monotonic_ns()).as_bytes());
    into.extend_from_slice(b"}\n");
}

/// The bytes of a delta up to its text. `kind` is the type of the event.
#[must_use]
pub fn delta_head(sid: &str, kind: &str) -> Vec<u8> {
    let quoted = serde_json::to_string(sid).unwrap_or_default();
    let mut head = Vec::with_capacity(160 + 2 * quoted.len());
    let _ = write!(
        head,
        "{{\"type\":\"rpc\",\"sid\":{quoted},\"message\":{{\"jsonrpc\":\"2.0\",\"method\":\"event\",\
         \"params\":{{\"type\":\"{kind}\",\"session_id\":{quoted},\"payload\":{{\"text\":"
    );
    head
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rpc::{Event, MessageComplete, Status};
    use expect_test::{Expect, expect};

    /// The encoded frame with its time blanked.
    fn encoded(output: &Output<'_>, max_bytes: usize) -> String {
        let mut line = Vec::new();
        output.encode(max_bytes, &mut line);
        let text = String::from_utf8(line).unwrap();
        let (head, _) = text.rsplit_once(',').unwrap();
        assert!(text.ends_with("}\n") && text.matches('\n').count() == 1);
        head.to_owned()
    }

    fn check(output: &Output<'_>, expected: Expect) {
        expected.assert_eq(&encoded(output, 10_000));
    }

    #[test]
    fn frames_begin_with_their_type_and_have_their_time() {
        let id = RequestId::text("r\"1");
        check(
            &Output::TurnAccepted {
                sid: "s",
                request_id: &id,
                queued_turns: 1,
            },
            expect![[r#"{"type":"turn.accepted","sid":"s","request_id":"r\"1","queued_turns":1"#]],
        );
        check(
            &Output::InterruptAck {
                sid: "",
                request_id: &id,
                applied: false,
                applied_ns: None,
            },
            expect![[r#"{"type":"interrupt.ack","sid":"","request_id":"r\"1","applied":false"#]],
        );
        let event = Event::MessageStart;
        check(
            &Output::Rpc {
                sid: "s",
                message: Message::Event {
                    sid: "s",
                    event,
                    seq: 3,
                },
            },
            expect![[
                r#"{"type":"rpc","sid":"s","message":{"jsonrpc":"2.0","method":"event","params":{"type":"message.start","session_id":"s","seq":3}}"#
            ]],
        );
        check(
            &Output::Error {
                sid: None,
                request_id: None,
                message: "x".into(),
                code: ErrorCode::InvalidJson,
            },
            expect![[r#"{"type":"error","message":"x","code":"invalid_json""#]],
        );
    }

    #[test]
    fn a_delta_is_the_same_both_ways() {
        let (sid, text) = ("s\"\u{1}", "a\n\"ü");
        let event = Event::MessageDelta { text: text.into() };
        let slow = encoded(
            &Output::Rpc {
                sid,
                message: Message::Event { sid, event, seq: 7 },
            },
            10_000,
        );
        let mut fast = Vec::new();
        encode_delta(&delta_head(sid, "message.delta"), text, 7, &mut fast);
        let fast = String::from_utf8(fast).unwrap();
        assert_eq!(fast.rsplit_once(',').unwrap().0, slow);
    }

    #[test]
    fn a_frame_that_is_too_long_is_cut_and_says_so() {
        let usage = Usage::default();
        for text in ["x".repeat(5_000), "ü\u{1}".repeat(2_000)] {
            let event = Event::MessageComplete(MessageComplete {
                text: text.as_str().into(),
                status: Status::Complete,
                usage: &usage,
                error: None,
                error_surface: None,
                partial: false,
                truncated: false,
            });
            let output = Output::Rpc {
                sid: "s",
                message: Message::Event {
                    sid: "s",
                    event,
                    seq: 1,
                },
            };
            let mut line = Vec::new();
            output.encode(1_024, &mut line);
            assert!(line.len() - 1 <= 1_024, "{}", line.len());
            let line = String::from_utf8(line).unwrap();
            assert!(
                line.contains("… [cut]") && line.contains(r#""truncated":true"#),
                "{line}"
            );
        }
    }
}
