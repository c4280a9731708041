//! What the supervisor itself says to the gateway.
//!
//! The core decides what is said; here it becomes a line, with its time.

use std::borrow::Cow;
use std::collections::BTreeMap;

use turnhost_protocol::frame::RequestId;
use turnhost_protocol::frame::output::{
    ErrorCode, ExecutionState, Output, Reason, TurnEnd, TurnError,
};
use turnhost_protocol::idle::{Work, idle_proof};
use turnhost_protocol::limits::{CAPACITY_CODE, CAPACITY_RETRY_MS};
use turnhost_protocol::rpc::{Event, Message, SessionInfo, Usage};

use super::pending::Kind;

/// A frame that is answered, and where the answer goes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Addressee {
    /// What the frame was.
    pub kind: Kind,
    /// Its id, made where it had none.
    pub id: RequestId,
    /// Its session, or empty.
    pub sid: String,
}

/// A frame of the supervisor's own.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Notice {
    /// A frame got no answer of a host, and gets none.
    Refused {
        /// The frame.
        to: Addressee,
        /// Why, in one word; only turns show it.
        reason: Reason,
        /// Whether a part of it may have run; only turns show it.
        state: ExecutionState,
        /// Why, in a sentence.
        message: String,
    },
    /// A line was longer than the limit.
    TooLong {
        /// The frame, as far as it shows.
        sid: Option<String>,
        /// Its id, as far as it shows.
        id: Option<RequestId>,
        /// How long it was and may be.
        message: String,
    },
    /// What is known of the session of a turn that no host had: its name. SPEC §4 wants it before
    /// each `turn.end`.
    SessionInfo {
        /// The session.
        sid: String,
        /// Its conversation.
        session_key: String,
    },
    /// A kept turn ended before any host had it.
    Interrupted {
        /// The turn.
        to: Addressee,
        /// Its conversation.
        session_key: String,
        /// The version that its frame named: the turn changed nothing.
        history_version: Option<u64>,
        /// When, on CLOCK_MONOTONIC.
        ended_ns: u64,
    },
    /// Answers an `interrupt` that no host gets.
    InterruptAck {
        /// The interrupt.
        to: Addressee,
        /// When a kept turn ended by it, on CLOCK_MONOTONIC.
        applied_ns: Option<u64>,
    },
    /// Something went wrong in a session.
    ErrorEvent {
        /// The session.
        sid: String,
        /// What.
        message: String,
        /// In one word.
        reason: Reason,
    },
    /// A question to the person is void.
    Withdrawn {
        /// Its session.
        sid: String,
        /// The question.
        id: String,
        /// What it asked for.
        method: String,
    },
    /// A host ended that nobody had asked to.
    Exited {
        /// How.
        exit: Exit,
        /// The delay until the next one; `None` when it stops trying.
        delay_ms: Option<u64>,
        /// Restarts that count against the budget, the coming one included.
        restarts_in_window: usize,
    },
    /// No host is started any more.
    GaveUp {
        /// Why, and what helps.
        message: String,
    },
}

/// How a process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Exit {
    /// By itself.
    Code(i32),
    /// By a signal.
    Signal(i32),
}

impl std::fmt::Display for Exit {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Code(code) => write!(formatter, "exited with code {code}"),
            Self::Signal(signal) => write!(formatter, "was killed by signal {signal}"),
        }
    }
}

impl Notice {
    /// Appends the line to `into`.
    pub fn encode(&self, max_frame_bytes: usize, into: &mut Vec<u8>) {
        let info = match self {
            Self::Interrupted { session_key, .. } => session_info(session_key),
            _ => session_info(""),
        };
        self.output(&info).encode(max_frame_bytes, into);
    }

    /// The frame; `info` is what the end of a turn shows of its session.
    fn output<'a>(&'a self, info: &'a SessionInfo) -> Output<'a> {
        match self {
            Self::Refused {
                to,
                reason,
                state,
                message,
            } => refused(to, *reason, *state, message),
            Self::TooLong { sid, id, message } => Output::Error {
                sid: sid.as_deref(),
                request_id: id.as_ref(),
                message: message.into(),
                code: ErrorCode::FrameTooLarge,
            },
            Self::SessionInfo { sid, session_key } => {
                let info = session_info(session_key);
                event(sid, Event::SessionInfo(Box::new(Cow::Owned(info))))
            }
            Self::Interrupted {
                to,
                session_key,
                history_version,
                ended_ns,
            } => Output::TurnEnd(TurnEnd {
                sid: &to.sid,
                request_id: &to.id,
                session_key,
                history_version: history_version.unwrap_or_default(),
                message_count: 0,
                interrupted: true,
                ended_ns: *ended_ns,
                session_info: Some(info),
                session_info_emitted: true,
                usage: &info.usage,
                truncated: false,
            }),
            Self::InterruptAck { to, applied_ns } => Output::InterruptAck {
                sid: &to.sid,
                request_id: &to.id,
                applied: applied_ns.is_some(),
                applied_ns: *applied_ns,
            },
            Self::ErrorEvent {
                sid,
                message,
                reason,
            } => event(
                sid,
                Event::Error {
                    message: message.into(),
                    reason: Some(reason.name()),
                },
            ),
            Self::Withdrawn { sid, id, method } => event(
                sid,
                Event::RequestCancel {
                    id,
                    method,
                    reason: Reason::Crash.name(),
                },
            ),
            Self::Exited {
                exit,
                delay_ms,
                restarts_in_window,
            } => {
                let (code, signal) = match exit {
                    Exit::Code(code) => (Some(*code), None),
                    Exit::Signal(signal) => (None, Some(*signal)),
                };
                Output::HostExited {
                    code,
                    signal,
                    will_retry: delay_ms.is_some(),
                    delay_ms: delay_ms.unwrap_or_default(),
                    restarts_in_window: *restarts_in_window,
                }
            }
            Self::GaveUp { message } => Output::HostGaveUp {
                message: message.into(),
            },
        }
    }
}

/// A session of which only its name is known: no host has it.
fn session_info(session_key: &str) -> SessionInfo {
    SessionInfo {
        model: String::new(),
        cwd: String::new(),
        running: false,
        title: String::new(),
        stored_session_id: session_key.to_owned(),
        usage: Usage::default(),
        personality: String::new(),
        tools: BTreeMap::new(),
        mcp_servers: Vec::new(),
        profile_name: String::new(),
        version: "",
    }
}

fn event<'a>(sid: &'a str, event: Event<'a>) -> Output<'a> {
    Output::Rpc {
        sid,
        message: Message::SupervisorEvent { sid, event },
    }
}

fn refused<'a>(
    to: &'a Addressee,
    reason: Reason,
    state: ExecutionState,
    message: &'a str,
) -> Output<'a> {
    let (sid, request_id) = (to.sid.as_str(), &to.id);
    let message = Cow::Borrowed(message);
    match to.kind {
        Kind::Turn => {
            let is_capacity = reason == Reason::Capacity;
            Output::TurnError(TurnError {
                sid,
                request_id,
                message,
                reason,
                execution_state: state,
                code: is_capacity.then_some(CAPACITY_CODE),
                retry_after_ms: is_capacity.then_some(CAPACITY_RETRY_MS),
            })
        }
        Kind::Control => Output::ControlError {
            sid,
            request_id,
            route_name: None,
            message,
        },
        Kind::Respond => Output::RespondError {
            sid,
            request_id,
            message,
        },
        Kind::IdleProbe => Output::IdleVerdict {
            request_id,
            verdict: idle_proof(Work::Unreadable, None),
        },
        Kind::Shutdown => Output::ShutdownAck { request_id },
        Kind::Interrupt
        | Kind::RequestsOpen
        | Kind::SessionList
        | Kind::SessionResume
        | Kind::SessionClose
        | Kind::Other => Output::Error {
            sid: (!sid.is_empty()).then_some(sid),
            request_id: Some(request_id),
            message,
            code: if reason == Reason::Capacity {
                ErrorCode::Capacity
            } else {
                ErrorCode::HostGone
            },
        },
    }
}
