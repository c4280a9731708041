//! The end that was asked for: end of input, a signal, or a `shutdown` frame: SPEC §8 and §9.
//!
//! Invariant: the first cause fixes the budget, a later one changes nothing of it.

use turnhost_protocol::limits;
use turnhost_protocol::look::members;

use super::{Action, Core, Drain, EndCode, Nanos, Next, Phase, Signal, from_ms};

impl Core {
    /// The gateway writes no more. A host that is about to say hello is given what was kept
    /// before its input ends, as it would be without a supervisor in between.
    pub(super) fn gateway_closed(&mut self, now: Nanos, actions: &mut Vec<Action>) {
        if std::mem::replace(&mut self.gateway_closed, true) {
            return;
        }
        match self.phase {
            Phase::Ready { .. } => self.close_host_input(now, actions),
            Phase::Failed { .. } if self.had_host => {
                self.drain_by(now, limits::STDIN_CLOSED_WAIT_MS);
            }
            Phase::Spawning
            | Phase::Starting { .. }
            | Phase::Registering
            | Phase::Failed { .. } => {
                self.drain.get_or_insert(Drain::AfterHello);
            }
            Phase::Waiting { .. } | Phase::Sweeping(_) | Phase::GaveUp { .. } | Phase::Over => {
                self.end_without_host(EndCode::GivenUp, actions);
            }
        }
    }

    /// Somebody sent the supervisor a signal: the host gets it too.
    pub(super) fn terminate(&mut self, now: Nanos, actions: &mut Vec<Action>) {
        self.terminated = true;
        if !self.host_runs() {
            self.end_without_host(EndCode::Orderly, actions);
        } else if matches!(self.drain, None | Some(Drain::AfterHello)) {
            self.drain = None;
            self.drain_by(now, limits::SIGNAL_WAIT_MS);
            actions.push(Action::SignalHost(Signal::Terminate));
            actions.push(Action::SignalHost(Signal::Continue));
        }
    }

    /// A `shutdown` frame came while there is no host that could take it, or soon will be.
    pub(super) fn shutdown_without_host(&mut self, actions: &mut Vec<Action>) {
        self.end_without_host(EndCode::Orderly, actions);
    }

    /// A `shutdown` frame, which begins at `offset`, went to the host.
    pub(super) fn shutdown_sent(&mut self, line: &[u8], offset: u64, now: Nanos) {
        let [wait_ms] = members(line, ["wait_ms"]);
        let wait_ms = wait_ms
            .and_then(|raw| serde_json::from_slice::<u64>(raw).ok())
            .unwrap_or(limits::SHUTDOWN_WAIT_MS)
            .min(limits::MAX_SHUTDOWN_WAIT_MS);
        if self.drain_by(now, wait_ms) {
            self.drained_by = Some(offset);
        }
    }

    /// The host drains by a `shutdown` that looked as if it would be refused, or after one that
    /// was: how long it takes is not known, but its end is no crash.
    pub(super) fn shutdown_accepted(&mut self, now: Nanos) {
        self.drain_by(now, limits::MAX_SHUTDOWN_WAIT_MS);
    }

    /// The host refused the `shutdown` that begins at `offset`, and works on. What was asked for
    /// meanwhile, and changed nothing then, counts now.
    pub(super) fn shutdown_refused(
        &mut self,
        offset: Option<u64>,
        now: Nanos,
        actions: &mut Vec<Action>,
    ) {
        let began_drain = offset.is_some() && offset == self.drained_by;
        if !began_drain || !matches!(self.drain, Some(Drain::Until(_))) {
            return;
        }
        self.drain = None;
        self.drained_by = None;
        if self.terminated {
            self.terminate(now, actions);
        } else if self.gateway_closed {
            self.drain_by(now, limits::STDIN_CLOSED_WAIT_MS);
        }
    }

    pub(super) fn close_host_input(&mut self, now: Nanos, actions: &mut Vec<Action>) {
        self.drain_by(now, limits::STDIN_CLOSED_WAIT_MS);
        actions.push(Action::CloseHostInput);
        // A stopped host would not see it.
        actions.push(Action::SignalHost(Signal::Continue));
    }

    /// Whether a host is there that will soon take frames.
    pub(super) fn is_starting(&self) -> bool {
        matches!(
            self.phase,
            Phase::Spawning | Phase::Starting { .. } | Phase::Registering
        )
    }

    /// Ends without waiting for another host; `if_given_up` is the code if it had given up.
    fn end_without_host(&mut self, if_given_up: EndCode, actions: &mut Vec<Action>) {
        if self.drain.is_none() {
            self.drain = Some(Drain::NoMore);
        }
        self.answer_kept(actions);
        match &mut self.phase {
            Phase::Waiting { .. } => self.end(EndCode::Orderly, actions),
            Phase::GaveUp { .. } => self.end(if_given_up, actions),
            Phase::Sweeping(sweep) => match sweep.next {
                Next::Spawn { .. } => sweep.next = Next::End(EndCode::Orderly),
                Next::GiveUp { .. } => sweep.next = Next::End(if_given_up),
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

    /// Begins a drain where none has begun; answers whether it did.
    fn drain_by(&mut self, now: Nanos, wait_ms: u64) -> bool {
        let begins = matches!(self.drain, None | Some(Drain::AfterHello));
        if begins {
            let kill_at = now + from_ms(wait_ms) + from_ms(limits::DRAIN_EXCESS_MS);
            self.drain = Some(Drain::Until(kill_at));
        }
        begins
    }
}
