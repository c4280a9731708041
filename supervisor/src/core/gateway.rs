//! What the gateway writes: relayed, kept, or answered at once.

use std::borrow::Cow;

use serde_json::value::RawValue;
use turnhost_protocol::frame::RequestId;
use turnhost_protocol::frame::fields::{Field, Fields};
use turnhost_protocol::frame::input::Input;
use turnhost_protocol::frame::output::{ExecutionState, Reason};
use turnhost_protocol::limits;
use turnhost_protocol::look::{look, members, text};

use super::notice::{Addressee, Notice};
use super::pending::{
    Answered, Kind, MAX_PENDING_BYTES, MAX_QUESTION_BYTES, Owed, Serial, request_id,
};
use super::{Action, Core, Drain, Kept, Nanos, Next, Phase, Signal};

/// The frame that only a supervisor takes: start a host now. It is owed no answer.
const RESTART: &str = "host.restart";

impl Core {
    pub(super) fn gateway_line(&mut self, line: &[u8], now: Nanos, actions: &mut Vec<Action>) {
        let line_as_read = repaired(line);
        let read = self.read(&line_as_read);
        let kind = match read.meaning {
            Meaning::Restart => return self.restart_asked(now, actions),
            // A hello.ack is for the host that said hello; another one does not miss it.
            Meaning::Acknowledged if matches!(self.phase, Phase::Ready { .. }) => {
                self.note_sent(None, line, now);
                return actions.push(Action::RelayToHost);
            }
            Meaning::Acknowledged => return,
            Meaning::Frame(kind) => kind,
        };
        let owed = Owed {
            kind,
            id: read.id,
            sid: read.sid,
            offset: None,
            answered: (kind == Kind::Respond).then(|| answered(line)).flatten(),
        };
        if matches!(self.phase, Phase::Ready { .. }) {
            return self.relay(owed, line, now, actions);
        }
        match kind {
            Kind::Interrupt => self.interrupt_kept(&owed, now, actions),
            Kind::IdleProbe => actions.push(self.refusal(owed, ExecutionState::NotStarted)),
            Kind::Shutdown if !self.is_starting() => {
                actions.push(self.refusal(owed, ExecutionState::NotStarted));
                self.shutdown_without_host(actions);
            }
            _ => self.keep_or_refuse(owed, line, actions),
        }
    }

    /// An id that a host gives back. It answers a longer one under an id that it makes.
    pub(super) fn short_id(&self, raw: Option<&RawValue>) -> Option<RequestId> {
        let max_bytes = limits::max_request_id_bytes(self.rules.max_frame_bytes);
        request_id(raw.filter(|raw| raw.get().len() <= max_bytes))
    }

    /// A name that a host repeats. A longer one is none to it.
    pub(super) fn short_name(&self, name: Option<String>) -> Option<String> {
        let max_bytes = limits::max_name_bytes(self.rules.max_frame_bytes);
        name.filter(|name| name.len() <= max_bytes)
    }

    /// Reads a line as the host will: a frame by its fields, anything else by its head alone. What
    /// the host will refuse is an unknown frame here, since an `error` answers it.
    fn read(&self, line: &[u8]) -> Read {
        let max = self.rules.max_frame_bytes;
        let text = std::str::from_utf8(line).ok();
        let Some(fields) = text.and_then(|line| Fields::parse(line, max).ok()) else {
            let look = look(&line[..line.len().min(limits::LOOK_BYTES)]);
            return Read {
                meaning: Meaning::Frame(if look.is_type("turn.start") {
                    Kind::Turn
                } else {
                    Kind::Other
                }),
                id: self.short_id(look.request_id()),
                sid: self.short_name(look.sid()),
            };
        };
        let name = fields.kind();
        let id = self.short_id(fields.raw(Field::RequestId));
        let has_usable_id = id.is_some() || fields.raw(Field::RequestId).is_none();
        let is_refused = || Input::from_fields(&fields).is_err();
        let meaning = match Kind::of_input(&name) {
            _ if name == RESTART => Meaning::Restart,
            None => Meaning::Acknowledged,
            Some(kind) if is_acted_on(kind) && (!has_usable_id || is_refused()) => {
                Meaning::Frame(Kind::Other)
            }
            Some(kind) => Meaning::Frame(kind),
        };
        Read {
            meaning,
            id,
            sid: fields.name(Field::Sid).ok().flatten(),
        }
    }

    pub(super) fn gateway_line_too_long(
        &mut self,
        head: &[u8],
        bytes: u64,
        actions: &mut Vec<Action>,
    ) {
        let look = look(head);
        let (id, sid) = (
            self.short_id(look.request_id()),
            self.short_name(look.sid()),
        );
        let max = self.rules.max_frame_bytes;
        let message = format!("a line of {bytes} bytes is longer than {max} (--max-frame-bytes)");
        actions.push(Action::Tell(if look.is_type("turn.start") {
            Notice::Refused {
                to: addressee(Kind::Turn, id, sid),
                reason: Reason::Invalid,
                state: ExecutionState::NotStarted,
                message,
            }
        } else {
            Notice::TooLong { sid, id, message }
        }));
    }

    /// Relays to a host that said hello.
    fn relay(&mut self, owed: Owed, line: &[u8], now: Nanos, actions: &mut Vec<Action>) {
        let Some(serial) = self.remember(owed, actions) else {
            return;
        };
        let was_draining = self.drain.is_some();
        self.note_sent(serial, line, now);
        actions.push(Action::RelayToHost);
        if self.drain.is_some() && !was_draining {
            // A stopped host would not read its shutdown.
            actions.push(Action::SignalHost(Signal::Continue));
        }
    }

    /// Enters a frame among those that are owed an answer, or refuses it; the inner `None` is a
    /// line that shows nothing an answer could name.
    #[allow(
        clippy::option_option,
        reason = "refused, nameless and entered are three things"
    )]
    fn remember(&mut self, owed: Owed, actions: &mut Vec<Action>) -> Option<Option<Serial>> {
        if owed.kind == Kind::Other && owed.id.is_none() {
            return Some(None);
        }
        if !self.has_room_for(&owed) {
            let message = "the host answers too slowly: too many frames wait for its answers";
            actions.push(Action::Tell(Notice::Refused {
                to: addressee(owed.kind, owed.id, owed.sid),
                reason: Reason::Capacity,
                state: ExecutionState::NotStarted,
                message: message.to_owned(),
            }));
            return None;
        }
        Some(Some(self.pending.add(owed)))
    }

    /// Whether one more frame may wait for its answer. What ends things finds room beyond that of
    /// others; the shutdown that begins the drain always does, later ones change nothing.
    fn has_room_for(&self, owed: &Owed) -> bool {
        let shares = match owed.kind {
            Kind::Shutdown if self.drain.is_none() => return true,
            Kind::Shutdown | Kind::Interrupt => 2,
            _ => 1,
        };
        self.pending.len() < shares * limits::MAX_PENDING_FRAMES
            && self.pending.bytes() + owed.bytes() <= shares * MAX_PENDING_BYTES
    }

    /// Whether a `shutdown` waits for the next host.
    fn keeps_shutdown(&mut self) -> bool {
        let Self { kept, pending, .. } = self;
        kept.iter().filter_map(|kept| kept.serial).any(|serial| {
            let owed = pending.get_mut(serial);
            owed.is_some_and(|owed| owed.kind == Kind::Shutdown)
        })
    }

    /// Notes where in the host's input a frame begins, and what its type means for the host.
    pub(super) fn note_sent(&mut self, serial: Option<Serial>, line: &[u8], now: Nanos) {
        let offset = self.sent;
        self.sent += line.len() as u64 + 1;
        let owed = serial.and_then(|serial| self.pending.get_mut(serial));
        let Some(owed) = owed else { return };
        owed.offset = Some(offset);
        if owed.kind == Kind::Shutdown {
            self.shutdown_sent(line, offset, now);
        }
    }

    fn keep_or_refuse(&mut self, owed: Owed, line: &[u8], actions: &mut Vec<Action>) {
        let has_room = self.kept.len() < limits::KEPT_FRAMES
            && self.kept_bytes + line.len() <= limits::KEPT_BYTES
            || owed.kind == Kind::Shutdown && !self.keeps_shutdown();
        if !self.will_be_ready() {
            actions.push(self.refusal(owed, ExecutionState::NotStarted));
        } else if has_room {
            if let Some(serial) = self.remember(owed, actions) {
                self.keep(serial, line);
            }
        } else {
            let message = "no host runs, and too many frames wait for the next one";
            actions.push(Action::Tell(Notice::Refused {
                to: addressee(owed.kind, owed.id, owed.sid),
                reason: Reason::Capacity,
                state: ExecutionState::NotStarted,
                message: message.to_owned(),
            }));
        }
    }

    fn keep(&mut self, serial: Option<Serial>, line: &[u8]) {
        self.kept_bytes += line.len();
        self.kept.push_back(Kept {
            serial,
            line: line.into(),
        });
    }

    /// Whether a host will come that takes what is kept.
    fn will_be_ready(&self) -> bool {
        if self.drain.is_some_and(|drain| drain != Drain::AfterHello) {
            return false;
        }
        match &self.phase {
            Phase::Waiting { .. }
            | Phase::Spawning
            | Phase::Starting { .. }
            | Phase::Registering
            | Phase::Ready { .. } => true,
            Phase::Failed { .. } => self.had_host,
            Phase::Sweeping(sweep) => matches!(sweep.next, Next::Spawn { .. }),
            Phase::GaveUp { .. } | Phase::Over => false,
        }
    }

    /// The answer to a frame that no host gets.
    fn refusal(&self, owed: Owed, state: ExecutionState) -> Action {
        let (reason, message) = if self.drain.is_some() {
            (Reason::Draining, "the supervisor is ending".to_owned())
        } else if self.trouble.is_empty() {
            (Reason::Crash, "no host runs yet".to_owned())
        } else {
            (Reason::Crash, format!("no host runs: {}", self.trouble))
        };
        Action::Tell(Notice::Refused {
            to: addressee(owed.kind, owed.id, owed.sid),
            reason,
            state,
            message,
        })
    }

    /// Answers an interrupt while no host runs: it ends the kept turns of its session.
    fn interrupt_kept(&mut self, owed: &Owed, now: Nanos, actions: &mut Vec<Action>) {
        let sid = owed.sid.as_deref().unwrap_or_default();
        let mut applied = false;
        let mut kept = std::mem::take(&mut self.kept);
        kept.retain(|frame| {
            let Some(serial) = frame.serial else {
                return true;
            };
            let of_session = |owed: &Owed| {
                owed.kind == Kind::Turn && owed.sid.as_deref().unwrap_or_default() == sid
            };
            if !self
                .pending
                .get_mut(serial)
                .is_some_and(|owed| of_session(owed))
            {
                return true;
            }
            self.kept_bytes -= frame.line.len();
            if let Some(turn) = self.pending.remove(serial) {
                let session_key = self.session_key(&turn, &frame.line);
                actions.push(Action::Tell(Notice::SessionInfo {
                    sid: turn.sid.clone().unwrap_or_default(),
                    session_key: session_key.clone(),
                }));
                let end = interrupted(turn, session_key, &frame.line, now);
                actions.push(Action::Tell(end));
                applied = true;
            }
            false
        });
        self.kept = kept;
        actions.push(Action::Tell(Notice::InterruptAck {
            to: addressee(owed.kind, owed.id.clone(), owed.sid.clone()),
            applied_ns: applied.then_some(now),
        }));
    }

    /// The conversation of a turn: what its frame names, else its session.
    fn session_key(&self, turn: &Owed, line: &[u8]) -> String {
        let [key] = members(line, ["session_key"]);
        let key = key.and_then(text).map(Cow::into_owned);
        let named = self.short_name(key);
        named.unwrap_or_else(|| turn.sid.clone().unwrap_or_default())
    }

    fn restart_asked(&mut self, now: Nanos, actions: &mut Vec<Action>) {
        if self.drain.is_some() {
            return;
        }
        match &mut self.phase {
            Phase::Waiting { .. } => self.spawn(now, actions),
            Phase::GaveUp { .. } => {
                self.respawn.forget();
                self.spawn(now, actions);
            }
            Phase::Sweeping(sweep) => match sweep.next {
                Next::Spawn { .. } => sweep.next = Next::Spawn { at: now },
                Next::GiveUp { .. } => {
                    self.respawn.forget();
                    sweep.next = Next::Spawn { at: now };
                }
                Next::End(_) => {}
            },
            Phase::Spawning
            | Phase::Starting { .. }
            | Phase::Registering
            | Phase::Ready { .. }
            | Phase::Failed { .. }
            | Phase::Over => {}
        }
    }
}

/// What the supervisor reads of a line of the gateway.
struct Read {
    meaning: Meaning,
    id: Option<RequestId>,
    sid: Option<String>,
}

/// What a line of the gateway is.
enum Meaning {
    /// `host.restart`.
    Restart,
    /// `hello.ack`.
    Acknowledged,
    /// Anything that its host answers.
    Frame(Kind),
}

/// The line as a host reads it: with lone surrogates replaced.
fn repaired(line: &[u8]) -> Cow<'_, [u8]> {
    let has = |escape| memchr::memmem::find(line, escape).is_some();
    if !has(b"\\ud") && !has(b"\\uD") {
        return Cow::Borrowed(line);
    }
    let mut copy = line.to_vec();
    turnhost_protocol::json::replace_lone_surrogates(&mut copy);
    Cow::Owned(copy)
}

/// Whether the supervisor itself does something about a frame of this kind, which it may do only
/// where the host would too.
fn is_acted_on(kind: Kind) -> bool {
    matches!(kind, Kind::Interrupt | Kind::IdleProbe | Kind::Shutdown)
}

/// Who gets the answer to a frame; one without an id is given one: SPEC §2.
pub(super) fn addressee(kind: Kind, id: Option<RequestId>, sid: Option<String>) -> Addressee {
    Addressee {
        kind,
        id: id.unwrap_or_else(RequestId::fresh),
        sid: sid.unwrap_or_default(),
    }
}

/// The question that a `respond` or `clarify.lock` settles if its host says ok.
fn answered(line: &[u8]) -> Option<Answered> {
    let [kind, params] = members(line, ["type", "params"]);
    let params = params?;
    let [frame, lock, cancel] = members(params, ["frame", "lock", "cancel"]);
    let is_lock_frame = kind.and_then(text).as_deref() == Some("clarify.lock");
    let (request, is_lock) = if is_lock_frame || lock.is_some() {
        let [request] = members(lock.unwrap_or(params), ["request_id"]);
        (request?, true)
    } else if cancel.is_some() {
        return None;
    } else {
        let [id, error] = members(frame.unwrap_or(params), ["id", "error"]);
        let [code] = error.map_or([None], |error| members(error, ["code"]));
        // 4404: this window does not show that session; the question stays open.
        if code == Some(b"4404") {
            return None;
        }
        (id?, false)
    };
    let request = text(request)?;
    // No question that is known here has a longer id.
    (request.len() <= MAX_QUESTION_BYTES).then(|| Answered {
        request: request.into_owned(),
        is_lock,
    })
}

/// The end of a kept turn that an interrupt reached before any host.
fn interrupted(turn: Owed, session_key: String, line: &[u8], now: Nanos) -> Notice {
    let [version] = members(line, ["history_version"]);
    let number: Option<&RawValue> = version.and_then(|raw| serde_json::from_slice(raw).ok());
    Notice::Interrupted {
        session_key,
        history_version: number.and_then(|raw| raw.get().parse().ok()),
        to: addressee(turn.kind, turn.id, turn.sid),
        ended_ns: now,
    }
}
