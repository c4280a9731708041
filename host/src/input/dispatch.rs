//! One line to its handler: the table of what the host understands.

use std::borrow::Cow;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use turnhost_protocol::frame::RequestId;
use turnhost_protocol::frame::fields::{Field, Fields, NotAFrame};
use turnhost_protocol::frame::input::{Input, Refused, TurnStart};
use turnhost_protocol::frame::output::{
    ErrorCode, ExecutionState, Output as Frame, Reason, TurnError,
};
use turnhost_protocol::idle::{Work, idle_proof};
use turnhost_protocol::json;
use turnhost_protocol::limits;
use turnhost_protocol::look::look;
use turnhost_protocol::process::monotonic_ns;

use crate::life::{Cause, Ending};
use crate::output::Output;
use crate::pool::Pool;
use crate::session::{AtTheDoor, Closing, Sessions, Terminal, Turn};
use crate::timers::Timers;
use crate::turn::Turns;

/// The frame types that this version handles: the `capabilities` of `hello`.
pub const HANDLED: [&str; 7] = [
    "turn.start",
    "interrupt",
    "session.list",
    "session.close",
    "idle.probe",
    "hello.ack",
    "shutdown",
];

/// Everything that a frame may reach.
pub struct Dispatcher {
    pub(crate) output: Output,
    pub(crate) sessions: Sessions,
    pub(crate) pool: Pool,
    pub(crate) turns: Arc<Turns>,
    pub(crate) timers: Timers,
    pub(crate) ending: Ending,
    pub(crate) max_frame_bytes: usize,
    pub(crate) max_queued_turns: usize,
    /// Bytes of the frames of turns that no worker has taken.
    pub(crate) queued_bytes: Arc<AtomicUsize>,
}

impl Dispatcher {
    pub(super) fn output(&self) -> &Output {
        &self.output
    }

    /// Handles one line. Whatever it is, it costs at most itself.
    pub(super) fn line(&self, line: &mut [u8]) {
        json::replace_lone_surrogates(line);
        let line_bytes = line.len();
        let parsed = match std::str::from_utf8(line) {
            Ok(text) => Fields::parse(text, self.max_frame_bytes),
            Err(error) => Err(NotAFrame::NoJson(format!("not UTF-8: {error}"))),
        };
        match parsed {
            Ok(fields) => self.frame(&fields, line_bytes),
            Err(why) => {
                let code = match why {
                    NotAFrame::NoJson(_) => ErrorCode::InvalidJson,
                    NotAFrame::NoObject => ErrorCode::InvalidFrame,
                };
                self.refuse_line(line, &why.to_string(), code);
            }
        }
    }

    /// Answers a line of `bytes` bytes that was skipped, of which `head` is the beginning.
    pub(super) fn too_long(&self, head: &[u8], bytes: u64) {
        let max = self.max_frame_bytes;
        let message = format!("a line of {bytes} bytes is longer than {max} (--max-frame-bytes)");
        self.refuse_line(head, &message, ErrorCode::FrameTooLarge);
    }

    /// Answers a line that is no frame, with what it shows of itself.
    fn refuse_line(&self, line: &[u8], message: &str, code: ErrorCode) {
        let look = look(&line[..line.len().min(limits::LOOK_BYTES)]);
        let short = |sid: &String| sid.len() <= limits::max_name_bytes(self.max_frame_bytes);
        let sid = look.sid().filter(short);
        let request_id = look
            .request_id()
            .filter(|raw| raw.get().len() <= limits::max_request_id_bytes(self.max_frame_bytes))
            .map(RequestId::new);
        if look.is_type("turn.start") {
            let request_id = request_id.unwrap_or_else(RequestId::fresh);
            self.refuse_turn(sid.as_deref().unwrap_or_default(), &request_id, message);
        } else {
            self.output.reply(&Frame::Error {
                sid: sid.as_deref(),
                request_id: request_id.as_ref(),
                message: message.into(),
                code,
            });
        }
    }

    fn frame(&self, fields: &Fields<'_>, line_bytes: usize) {
        let (request_id, input) = match fields.request_id() {
            Ok(request_id) => (request_id, Input::from_fields(fields)),
            Err(error) => (RequestId::fresh(), Err(Refused::Invalid(error))),
        };
        match input {
            Ok(input) => self.dispatch(&request_id, input, line_bytes),
            Err(refused) => self.refuse_frame(fields, &request_id, &refused),
        }
    }

    /// The table. Everything here is answered on the reader; a turn is only queued by it.
    fn dispatch(&self, id: &RequestId, input: Input, line_bytes: usize) {
        match input {
            // To a worker.
            Input::TurnStart(start) => self.turn_start(id, *start, line_bytes),

            // At once.
            Input::Interrupt {
                sid,
                queued_prompt_generation,
            } => {
                self.interrupt(id, &sid, queued_prompt_generation);
            }
            Input::SessionClose { sid } => self.session_close(id, &sid),
            Input::SessionList => self.output.reply(&Frame::SessionListAck {
                request_id: id,
                sessions: &self.sessions.list(),
                truncated: false,
            }),
            Input::IdleProbe => self.idle_probe(id),
            Input::Shutdown { wait_ms } => self.shutdown(id, wait_ms),
            Input::HelloAck => {}

            // Known frames whose handlers this version does not have.
            Input::Control(control) => {
                let route = Some(control.route_name.as_str()).filter(|route| !route.is_empty());
                self.control_error(id, &control.sid, route, UNSUPPORTED);
            }
            Input::ReloadMcp { sid } => self.control_error(id, &sid, None, UNSUPPORTED),
            Input::Respond { sid, .. } | Input::ClarifyLock { sid, .. } => {
                self.output.reply(&Frame::RespondError {
                    sid: &sid,
                    request_id: id,
                    message: UNSUPPORTED.into(),
                });
            }
            Input::RequestsOpen { sid } => {
                self.error(id, sid.as_deref(), UNSUPPORTED, ErrorCode::Unsupported);
            }
            Input::SessionResume { sid, .. } => {
                self.error(id, Some(&sid), UNSUPPORTED, ErrorCode::Unsupported);
            }
        }
    }

    /// Answers a frame that cannot be handled with the error of its type.
    fn refuse_frame(&self, fields: &Fields<'_>, id: &RequestId, refused: &Refused) {
        let sid = fields.name(Field::Sid).ok().flatten();
        let named = sid.as_deref().unwrap_or_default();
        let message = match refused {
            Refused::UnknownType(kind) => {
                let kind = json::quoted(kind, limits::MAX_QUOTED_BYTES);
                return self.error(
                    id,
                    sid.as_deref(),
                    &format!("unknown frame type: {kind}"),
                    ErrorCode::UnknownType,
                );
            }
            Refused::Invalid(error) => error.to_string(),
        };
        match &*fields.kind() {
            "turn.start" => self.refuse_turn(named, id, &message),
            "control" | "reload_mcp" => self.control_error(id, named, None, &message),
            "respond" | "clarify.lock" => self.output.reply(&Frame::RespondError {
                sid: named,
                request_id: id,
                message: message.into(),
            }),
            _ => self.error(id, sid.as_deref(), &message, ErrorCode::InvalidFrame),
        }
    }

    fn refuse_turn(&self, sid: &str, request_id: &RequestId, message: &str) {
        self.output.reply(&Frame::TurnError(TurnError {
            sid,
            request_id,
            message: message.into(),
            reason: Reason::Invalid,
            execution_state: ExecutionState::NotStarted,
            code: None,
            retry_after_ms: None,
        }));
    }

    fn error(&self, id: &RequestId, sid: Option<&str>, message: &str, code: ErrorCode) {
        let message = Cow::Borrowed(message);
        self.output.reply(&Frame::Error {
            sid,
            request_id: Some(id),
            message,
            code,
        });
    }

    fn control_error(&self, id: &RequestId, sid: &str, route_name: Option<&str>, message: &str) {
        let message = Cow::Borrowed(message);
        self.output.reply(&Frame::ControlError {
            sid,
            request_id: id,
            route_name,
            message,
        });
    }

    fn turn_start(&self, id: &RequestId, start: TurnStart, line_bytes: usize) {
        let backlog = self.pool.backlog_with_one_more();
        let at_the_door = AtTheDoor {
            is_full: backlog > self.max_queued_turns || !self.has_memory_for(line_bytes),
            is_draining: self.ending.has_begun(),
        };
        let queued_turns = self.pool.load().queued + 1;
        let admitted = self.sessions.admit(&start, id, at_the_door, |lane| {
            let accepted = Frame::TurnAccepted {
                sid: lane.sid(),
                request_id: id,
                queued_turns,
            };
            self.output.session_reply(lane, &accepted);
        });
        let turn = match admitted {
            Ok(turn) => turn,
            Err(refusal) => return self.output.reply(&refusal.frame(&start.sid, id)),
        };
        let (turns, job_turn) = (Arc::clone(&self.turns), Arc::clone(&turn));
        let queued = QueuedBytes::new(&self.queued_bytes, line_bytes);
        let submitted = self.pool.submit(turn.number.0, move |place| {
            drop(queued);
            turns.run(&job_turn, start, place);
        });
        if let Err(error) = submitted {
            let message = error.to_string();
            self.sessions.settle(
                &turn,
                Terminal::Error {
                    reason: Reason::Exception,
                    message,
                },
            );
        }
    }

    fn has_memory_for(&self, line_bytes: usize) -> bool {
        let queued = self.queued_bytes.load(Ordering::Relaxed);
        queued + line_bytes <= limits::MAX_QUEUED_TURN_BYTES
    }

    fn interrupt(&self, id: &RequestId, sid: &str, generation: Option<i64>) {
        let turn = self.sessions.interrupt(sid, generation, |applied| {
            self.output.reply(&Frame::InterruptAck {
                sid,
                request_id: id,
                applied,
                applied_ns: applied.then(monotonic_ns),
            });
        });
        if let Some(turn) = turn {
            self.end_soon(&turn);
        }
    }

    /// Lets a turn that was asked to end see it: one that waits for a worker ends right here.
    fn end_soon(&self, turn: &Turn) {
        if self.pool.withdraw(turn.number.0) {
            self.sessions
                .settle(turn, Terminal::End { interrupted: true });
        } else {
            turn.port.wake();
        }
    }

    fn session_close(&self, id: &RequestId, sid: &str) {
        match self.sessions.close(sid, id) {
            Closing::Unknown => self.error(id, Some(sid), "session not found", ErrorCode::NotFound),
            Closing::Closed => {}
            Closing::Waiting(turn) => {
                self.end_soon(&turn);
                let (sessions, pool) = (self.sessions.clone(), self.pool.clone());
                let patience = Duration::from_millis(limits::SESSION_CLOSE_WAIT_MS);
                self.timers.at(Instant::now() + patience, move || {
                    give_up(&sessions, &pool, &turn);
                });
            }
        }
    }

    fn idle_probe(&self, id: &RequestId) {
        let busy = self.sessions.busy_sids();
        let work = if !busy.is_empty() {
            Work::Some(Some(format!("session:{}", busy.join(","))))
        } else if self.pool.load().abandoned > 0 {
            // Its session has ended, its thread has not.
            Work::Some(None)
        } else {
            Work::None
        };
        // No room of this version asks a person anything outside a turn.
        let verdict = idle_proof(work, Some(0));
        self.output.reply(&Frame::IdleVerdict {
            request_id: id,
            verdict,
        });
    }

    fn shutdown(&self, id: &RequestId, wait_ms: Option<u64>) {
        self.output.reply(&Frame::ShutdownAck { request_id: id });
        // It goes before whatever the end of the process says.
        self.output.flush();
        let wait_ms = wait_ms.unwrap_or(limits::SHUTDOWN_WAIT_MS);
        self.ending.begin(Cause::Shutdown {
            wait_ms: wait_ms.min(limits::MAX_SHUTDOWN_WAIT_MS),
        });
    }
}

/// Counts the bytes of a frame as queued until it drops.
struct QueuedBytes {
    all: Arc<AtomicUsize>,
    bytes: usize,
}

impl QueuedBytes {
    fn new(all: &Arc<AtomicUsize>, bytes: usize) -> Self {
        all.fetch_add(bytes, Ordering::Relaxed);
        Self {
            all: Arc::clone(all),
            bytes,
        }
    }
}

impl Drop for QueuedBytes {
    fn drop(&mut self) {
        self.all.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

const UNSUPPORTED: &str = "this frame is not supported by this version of turnhost";

/// Ends a turn that did not end when it was asked to, for the person who closes its session.
fn give_up(sessions: &Sessions, pool: &Pool, turn: &Turn) {
    let message = "the turn did not end when its session was closed; parts of it may still run";
    let terminal = Terminal::Error {
        reason: Reason::Exception,
        message: message.to_owned(),
    };
    if sessions.is_live(turn) {
        // First the place, so that the host is never taken for idle between the two.
        pool.abandon(turn.number.0);
        sessions.settle(turn, terminal);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use turnhost_protocol::frame::input::TYPES;

    #[test]
    fn every_handled_type_is_one_of_the_contract() {
        assert!(HANDLED.iter().all(|kind| TYPES.contains(kind)));
    }
}
