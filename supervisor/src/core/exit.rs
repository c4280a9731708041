//! The end of a host: what it owes is answered, what it left is ended, the next one is planned.

use turnhost_protocol::frame::output::{ExecutionState, Reason};
use turnhost_protocol::limits;

use super::gateway::addressee;
use super::notice::{Exit, Notice};
use super::pending::{Kind, Owed};
use super::respawn::Verdict;
use super::{Action, Core, Drain, EndCode, Level, Nanos, Next, Phase, Signal, Sweep, from_ms};

/// How often what is left of a session is counted.
const LOOK_MS: u64 = 20;

impl Core {
    pub(super) fn host_exited(
        &mut self,
        exit: Exit,
        written: u64,
        now: Nanos,
        actions: &mut Vec<Action>,
    ) {
        if !self.host_runs() {
            return;
        }
        let hello_at = match self.phase {
            Phase::Ready { hello_at } => Some(hello_at),
            Phase::Failed { hello_at, .. } => hello_at,
            _ => None,
        };
        let failed_because = std::mem::take(&mut self.trouble);
        let why = match (&self.phase, hello_at) {
            (Phase::Failed { .. }, _) => format!("{failed_because}; it {exit}"),
            (_, None) => format!("the host {exit} before its hello"),
            (_, Some(_)) => format!("the host {exit}"),
        };
        let next = self.after_end(&why, Some(exit), hello_at, now, actions);
        self.answer_everything(&why, Some(written), next, actions);
        self.announce_end(next, actions);
        self.phase = Phase::Sweeping(Sweep {
            next,
            look_at: now + from_ms(LOOK_MS),
            kill_at: now + from_ms(limits::SESSION_WAIT_MS),
            give_up_at: now + from_ms(limits::SESSION_GIVE_UP_MS),
        });
        actions.push(Action::SignalSession(Signal::Terminate));
    }

    /// Ends although a host that was killed is still there. Its record stays, so that the next
    /// supervisor finds it.
    pub(super) fn leave_host(&mut self, actions: &mut Vec<Action>) {
        let message = "the host does not end, not even by SIGKILL; it is left behind";
        actions.push(Action::Log(Level::Error, message.to_owned()));
        let code = if self.end_was_asked_for() {
            EndCode::Orderly
        } else {
            EndCode::NoFirstHost
        };
        let next = Next::End(code);
        // How much of its input was written is not known here: all of it may be.
        self.answer_everything(message, Some(u64::MAX), next, actions);
        self.announce_end(next, actions);
        self.enter(next, actions);
    }

    pub(super) fn spawn_failed(&mut self, message: String, now: Nanos, actions: &mut Vec<Action>) {
        actions.push(Action::Log(Level::Error, message.clone()));
        let next = self.after_end(&message, None, None, now, actions);
        self.answer_everything(&message, None, next, actions);
        self.announce_end(next, actions);
        self.enter(next, actions);
    }

    /// Decides what follows, and tells the gateway of an exit that nobody asked for.
    fn after_end(
        &mut self,
        why: &str,
        exit: Option<Exit>,
        hello_at: Option<Nanos>,
        now: Nanos,
        actions: &mut Vec<Action>,
    ) -> Next {
        if self.end_was_asked_for() {
            return Next::End(EndCode::Orderly);
        }
        let verdict = if self.had_host {
            self.respawn.after_exit(now, hello_at)
        } else {
            Verdict::GiveUp { until: None }
        };
        let (delay_ms, next) = match verdict {
            Verdict::Retry { delay_ms } => {
                let at = now + from_ms(delay_ms);
                (Some(delay_ms), Next::Spawn { at })
            }
            Verdict::GiveUp { .. } if !self.had_host => (None, Next::End(EndCode::NoFirstHost)),
            Verdict::GiveUp { until } => (None, Next::GiveUp { until }),
        };
        why.clone_into(&mut self.trouble);
        actions.push(Action::Log(
            Level::Error,
            match delay_ms {
                Some(delay_ms) => format!("{why}; the next one is started in {delay_ms} ms"),
                None => format!("{why}; none is started any more"),
            },
        ));
        if let Some(exit) = exit {
            actions.push(Action::Tell(Notice::Exited {
                exit,
                delay_ms,
                restarts_in_window: self.respawn.granted(),
            }));
        }
        next
    }

    /// Tells the gateway once that no host is started any more.
    fn announce_end(&mut self, next: Next, actions: &mut Vec<Action>) {
        let why = &self.trouble;
        let message = match next {
            Next::End(EndCode::NoFirstHost) => {
                format!("the first host could not be started: {why}")
            }
            Next::GiveUp { .. } => {
                let rules = self.respawn.rules();
                format!(
                    "{why}; after {} restarts within {} s no other is started; \
                     a frame host.restart starts one, or wait until the window has room",
                    rules.max,
                    rules.window_ms / 1_000,
                )
            }
            Next::Spawn { .. } | Next::End(_) => return,
        };
        actions.push(Action::Tell(Notice::GaveUp { message }));
    }

    /// Answers what the ended host owes, and what is kept if no other host comes. `written` is
    /// how many bytes it was given.
    fn answer_everything(
        &mut self,
        why: &str,
        written: Option<u64>,
        next: Next,
        actions: &mut Vec<Action>,
    ) {
        let reason = self.reason();
        let also_kept = !matches!(next, Next::Spawn { .. });
        for owed in self.pending.take(also_kept) {
            let may_have_run = match (owed.offset, written) {
                (Some(offset), Some(written)) => offset < written,
                // A kept frame was never given to any host.
                (None, _) | (_, None) => false,
            };
            answer(owed, reason, may_have_run, why, actions);
        }
        if also_kept {
            self.kept.clear();
            self.kept_bytes = 0;
        }
        for question in self.questions.take() {
            actions.push(Action::Tell(Notice::Withdrawn {
                sid: question.sid,
                id: question.id,
                method: question.method,
            }));
        }
    }

    /// Answers what is kept when no other host will come.
    pub(super) fn answer_kept(&mut self, actions: &mut Vec<Action>) {
        self.kept_bytes = 0;
        for kept in std::mem::take(&mut self.kept) {
            let owed = kept.serial.and_then(|serial| self.pending.remove(serial));
            if let Some(owed) = owed {
                let why = "the supervisor is ending";
                answer(owed, self.reason(), false, why, actions);
            }
        }
    }

    fn reason(&self) -> Reason {
        if self.end_was_asked_for() {
            Reason::Draining
        } else {
            Reason::Crash
        }
    }

    /// Whether an exit is no news. A first host that never said hello is, although its input ended.
    fn end_was_asked_for(&self) -> bool {
        match self.drain {
            None => false,
            Some(Drain::AfterHello) => self.had_host,
            Some(Drain::Until(_) | Drain::NoMore) => true,
        }
    }

    pub(super) fn session_left(&mut self, left: usize, now: Nanos, actions: &mut Vec<Action>) {
        let Phase::Sweeping(sweep) = &mut self.phase else {
            return;
        };
        if left > 0 && now < sweep.give_up_at {
            sweep.look_at = now + from_ms(LOOK_MS);
            return;
        }
        let next = sweep.next;
        if left > 0 {
            let message = format!(
                "{left} processes of the ended host's session do not end, not even by SIGKILL; \
                 going on without them"
            );
            actions.push(Action::Log(Level::Error, message));
        }
        actions.push(Action::Reap);
        self.enter(next, actions);
    }

    /// Nothing is left of the old host.
    fn enter(&mut self, next: Next, actions: &mut Vec<Action>) {
        match next {
            Next::Spawn { at } => self.phase = Phase::Waiting { at },
            Next::GiveUp { until } => self.phase = Phase::GaveUp { until },
            Next::End(code) => self.end(code, actions),
        }
    }

    pub(super) fn end(&mut self, code: EndCode, actions: &mut Vec<Action>) {
        self.phase = Phase::Over;
        actions.push(Action::End(code));
    }
}

/// The one answer to a frame that its host did not answer.
fn answer(owed: Owed, reason: Reason, may_have_run: bool, why: &str, actions: &mut Vec<Action>) {
    let to = addressee(owed.kind, owed.id, owed.sid);
    if owed.kind == Kind::Turn {
        actions.push(Action::Tell(Notice::ErrorEvent {
            sid: to.sid.clone(),
            message: why.to_owned(),
            reason,
        }));
    }
    actions.push(Action::Tell(Notice::Refused {
        to,
        reason,
        state: if may_have_run {
            ExecutionState::Unknown
        } else {
            ExecutionState::NotStarted
        },
        message: why.to_owned(),
    }));
}
