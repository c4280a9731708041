//! The decisions of the supervisor: one pure step from state, event and time to actions.
//!
//! No I/O, no thread, no clock: [`Core::step`] is told what happened and when, and answers what to
//! do. Whoever drives it does each action in order, and feeds what comes of it back as events
//! before anything else. Bytes of frames are never looked at twice and never changed: an action
//! says "relay the line of this event", or hands over a line that was kept.
//!
//! Invariant: a host is sent nothing before its hello is accepted and its record is written.
//! Invariant: a frame of the gateway is at one place: kept, at the host, or answered.
//! Invariant: each frame that is owed an answer gets exactly one; nothing is sent twice.
//! Invariant: a signal goes to the present host only, and a new one is spawned only after the old
//! one was reaped and its session was ended.

mod drain;
mod exit;
mod gateway;
mod host;
mod notice;
mod pending;
mod respawn;
mod watchdog;

#[cfg(test)]
mod simulation;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::path::PathBuf;

use turnhost_protocol::limits;

pub use notice::{Addressee, Exit, Notice};
pub use pending::Kind;
pub use respawn::RespawnRules;
pub use watchdog::HostLook;

use pending::{Pending, Questions, Serial};
use respawn::Respawn;
use watchdog::Watchdog;

/// A time on CLOCK_MONOTONIC, or a length of time, in nanoseconds.
pub type Nanos = u64;

/// How long a killed host is waited for before it is left behind, in milliseconds: only the kernel
/// itself can hold it.
const KILL_WAIT_MS: u64 = 3_000;

/// Milliseconds as nanoseconds.
#[must_use]
pub const fn from_ms(ms: u64) -> Nanos {
    ms.saturating_mul(1_000_000)
}

/// What a core has to know.
#[derive(Debug, Clone)]
pub struct Rules {
    /// Longest line, without its line end.
    pub max_frame_bytes: usize,
    /// The home that a hello has to name, in each spelling that a host may use.
    pub homes: Vec<PathBuf>,
    /// The build that a hello has to name; empty matches all.
    pub build_sha: String,
    /// Interval of heartbeats of a host whose hello names none; 0 = it is not watched.
    pub heartbeat: Nanos,
    /// The budget of restarts.
    pub respawn: RespawnRules,
    /// How long a host may take to say hello.
    pub hello_wait: Nanos,
}

/// Something that happened.
#[derive(Debug)]
pub enum Event<'a> {
    /// The gateway wrote a line.
    GatewayLine(&'a [u8]),
    /// The gateway wrote a line that is too long; this is its head.
    GatewayLineTooLong {
        /// The first bytes.
        head: &'a [u8],
        /// The length of the whole.
        bytes: u64,
    },
    /// The gateway writes no more, or can read no more.
    GatewayClosed,
    /// Somebody asked the supervisor to end.
    Terminate,
    /// The host was spawned.
    Spawned,
    /// The host could not be spawned.
    SpawnFailed {
        /// What was tried, and what the system said.
        message: String,
    },
    /// The host wrote a line.
    HostLine(&'a [u8]),
    /// The host wrote a line that is too long; this is its head.
    HostLineTooLong {
        /// The first bytes.
        head: &'a [u8],
        /// The length of the whole.
        bytes: u64,
    },
    /// The host closed its input or its output.
    HostPipeClosed,
    /// The record of the host was written, or could not be.
    Registered(Result<(), String>),
    /// The host ended, and each whole line of it was handed over.
    HostExited {
        /// How.
        exit: Exit,
        /// Bytes that were written to it.
        written: u64,
    },
    /// Processes that are left in the session of the host that ended.
    SessionLeft(usize),
    /// Time passed; how the host looks where one runs.
    Time(Option<HostLook>),
}

/// Something to do.
#[derive(Debug, PartialEq, Eq)]
pub enum Action {
    /// Write the line of the event to the host.
    RelayToHost,
    /// Write a line that was kept to the host.
    SendToHost(Box<[u8]>),
    /// Close the host's input after what is written to it.
    CloseHostInput,
    /// Write the line of the event to the gateway.
    RelayToGateway,
    /// Tell the gateway something.
    Tell(Notice),
    /// Start a host; answered by [`Event::Spawned`] or [`Event::SpawnFailed`].
    Spawn,
    /// Write the record of the host; answered by [`Event::Registered`].
    Register {
        /// From its hello.
        boot_id: String,
        /// From its hello.
        build_sha: String,
    },
    /// Send the host a signal.
    SignalHost(Signal),
    /// Send every process in the ended host's session a signal; answered by
    /// [`Event::SessionLeft`].
    SignalSession(Signal),
    /// Count those processes; answered by [`Event::SessionLeft`].
    CountSession,
    /// Reap the host and remove its record.
    Reap,
    /// Log a line.
    Log(Level, String),
    /// Everything is over: end with this code when the gateway has read what it was told.
    End(EndCode),
}

/// The signals that a core sends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Signal {
    /// SIGTERM: please end.
    Terminate,
    /// SIGCONT: a stopped process takes no SIGTERM.
    Continue,
    /// SIGKILL.
    Kill,
}

/// How much a line of the log matters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Level {
    /// Something normal.
    Info,
    /// Something that was dealt with.
    Warning,
    /// Something that a person should look at.
    Error,
}

/// The exit codes of SPEC §9 that a core decides.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EndCode {
    /// An orderly end.
    Orderly = 0,
    /// The first host could not be started.
    NoFirstHost = 69,
    /// The gateway left after it was told that no host is started any more.
    GivenUp = 70,
}

/// Where the present host is in its life.
#[derive(Debug)]
enum Phase {
    /// None runs; the next one is started then.
    Waiting { at: Nanos },
    /// It is being spawned.
    Spawning,
    /// It runs and has not said hello.
    Starting { deadline: Nanos },
    /// It said hello; its record is being written.
    Registering,
    /// It works.
    Ready { hello_at: Nanos },
    /// It was told to end because it failed.
    Failed {
        kill_at: Option<Nanos>,
        hello_at: Option<Nanos>,
    },
    /// It ended; what it left in its session is being ended.
    Sweeping(Sweep),
    /// None runs, and none is started before that time, if ever.
    GaveUp { until: Option<Nanos> },
    /// Nothing happens any more.
    Over,
}

#[derive(Debug)]
struct Sweep {
    next: Next,
    /// When to look again.
    look_at: Nanos,
    /// From then on SIGKILL.
    kill_at: Nanos,
    /// From then on no more.
    give_up_at: Nanos,
}

/// What follows once nothing of a host is left.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Next {
    Spawn { at: Nanos },
    GiveUp { until: Option<Nanos> },
    End(EndCode),
}

/// A frame that waits for a host.
#[derive(Debug)]
struct Kept {
    /// Its entry among the frames that are owed an answer.
    serial: Option<Serial>,
    line: Box<[u8]>,
}

/// An end that was asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Drain {
    /// By the end of input, while the host has not said hello: it gets what was kept first.
    AfterHello,
    /// The host is killed then.
    Until(Nanos),
    /// There is no host, or it was killed.
    NoMore,
}

/// What a core says of itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CoreStatus {
    /// A word for where the host is in its life.
    pub phase: &'static str,
    /// Turns without a terminal frame.
    pub pending_turns: usize,
    /// Frames without an answer, turns included.
    pub pending_frames: usize,
    /// Frames that wait for a host.
    pub kept_frames: usize,
    /// Questions to the person.
    pub open_requests: usize,
    /// Restarts that count against the budget.
    pub restarts_in_window: usize,
}

/// The state of a supervisor.
#[derive(Debug)]
pub struct Core {
    rules: Rules,
    phase: Phase,
    drain: Option<Drain>,
    /// The gateway writes no more; its host's input is closed once it has all.
    gateway_closed: bool,
    /// Somebody asked the supervisor to end.
    terminated: bool,
    /// Where the `shutdown` that began the drain begins in the bytes for the present host.
    drained_by: Option<u64>,
    /// Some host said hello: what follows are restarts.
    had_host: bool,
    /// What is wrong with the host, for those who ask why none runs.
    trouble: String,
    /// Bytes for the present host.
    sent: u64,
    /// The present host closed a pipe; until then it may end by itself.
    pipe_closed_until: Option<Nanos>,
    /// The present host was sent SIGKILL; it should be gone by then.
    gone_by: Option<Nanos>,
    pending: Pending,
    questions: Questions,
    kept: VecDeque<Kept>,
    kept_bytes: usize,
    respawn: Respawn,
    watchdog: Watchdog,
}

impl Core {
    /// A core that wants to spawn its first host at once.
    #[must_use]
    pub fn new(rules: Rules) -> Self {
        Self {
            phase: Phase::Waiting { at: 0 },
            drain: None,
            gateway_closed: false,
            terminated: false,
            drained_by: None,
            had_host: false,
            trouble: String::new(),
            sent: 0,
            pipe_closed_until: None,
            gone_by: None,
            pending: Pending::default(),
            questions: Questions::default(),
            kept: VecDeque::new(),
            kept_bytes: 0,
            respawn: Respawn::new(rules.respawn.clone()),
            watchdog: Watchdog::new(0),
            rules,
        }
    }

    /// Takes an event into account, and appends what to do to `actions`.
    pub fn step(&mut self, event: Event<'_>, now: Nanos, actions: &mut Vec<Action>) {
        match event {
            Event::GatewayLine(line) => self.gateway_line(line, now, actions),
            Event::GatewayLineTooLong { head, bytes } => {
                self.gateway_line_too_long(head, bytes, actions);
            }
            Event::GatewayClosed => self.gateway_closed(now, actions),
            Event::Terminate => self.terminate(now, actions),
            Event::Spawned => self.spawned(now, actions),
            Event::SpawnFailed { message } => self.spawn_failed(message, now, actions),
            Event::HostLine(line) => self.host_line(line, now, actions),
            Event::HostLineTooLong { head, bytes } => {
                self.host_line_too_long(head, bytes, now, actions);
            }
            Event::HostPipeClosed => {
                self.pipe_closed_until = Some(now + from_ms(limits::PIPE_CLOSED_WAIT_MS));
            }
            Event::Registered(result) => self.registered(result, now, actions),
            Event::HostExited { exit, written } => self.host_exited(exit, written, now, actions),
            Event::SessionLeft(left) => self.session_left(left, now, actions),
            Event::Time(look) => self.time_passed(look, now, actions),
        }
    }

    /// When [`Event::Time`] is due next.
    #[must_use]
    pub fn deadline(&self) -> Option<Nanos> {
        let of_phase = match &self.phase {
            Phase::Waiting { at } => Some(*at),
            Phase::Starting { deadline } => Some(*deadline),
            Phase::Ready { .. } if self.drain.is_none() => self.watchdog.next_look(),
            Phase::Failed { kill_at, .. } => *kill_at,
            Phase::Sweeping(sweep) => Some(sweep.look_at),
            Phase::GaveUp { until } => *until,
            Phase::Ready { .. } | Phase::Registering | Phase::Spawning | Phase::Over => None,
        };
        let of_drain = match self.drain {
            Some(Drain::Until(at)) if self.host_runs() => Some(at),
            _ => None,
        };
        let of_pipe = self.pipe_closed_until.filter(|_| self.is_watched());
        let of_killed = self.gone_by.filter(|_| self.may_leave_host());
        let all = of_phase.into_iter().chain(of_drain).chain(of_pipe);
        all.chain(of_killed).min()
    }

    /// Whether the host still has to say hello: it is read for that, whatever the gateway reads.
    #[must_use]
    pub fn waits_for_hello(&self) -> bool {
        matches!(self.phase, Phase::Starting { .. })
    }

    /// Whether the end was asked for.
    #[must_use]
    pub fn is_ending(&self) -> bool {
        self.drain.is_some() || self.gateway_closed
    }

    /// What there is to say of it.
    #[must_use]
    pub fn status(&self) -> CoreStatus {
        CoreStatus {
            phase: match self.phase {
                Phase::Ready { .. } if self.drain.is_some() => "draining",
                Phase::Ready { .. } => "running",
                Phase::Waiting { .. } => "waiting",
                Phase::Spawning | Phase::Starting { .. } | Phase::Registering => "starting",
                Phase::Failed { .. } | Phase::Sweeping(_) => "ending",
                Phase::GaveUp { .. } => "gave up",
                Phase::Over => "ended",
            },
            pending_turns: self.pending.turns(),
            pending_frames: self.pending.len(),
            kept_frames: self.kept.len(),
            open_requests: self.questions.len(),
            restarts_in_window: self.respawn.granted(),
        }
    }

    /// Whether there is a process that signals reach.
    fn host_runs(&self) -> bool {
        matches!(
            self.phase,
            Phase::Starting { .. }
                | Phase::Registering
                | Phase::Ready { .. }
                | Phase::Failed { .. }
        )
    }

    /// Whether a host that goes wrong is ended for it; one that is ending has its own deadline.
    fn is_watched(&self) -> bool {
        self.drain.is_none()
            && matches!(
                self.phase,
                Phase::Starting { .. } | Phase::Registering | Phase::Ready { .. }
            )
    }

    fn time_passed(&mut self, look: Option<HostLook>, now: Nanos, actions: &mut Vec<Action>) {
        if let Some(Drain::Until(at)) = self.drain
            && at <= now
        {
            self.drain = Some(Drain::NoMore);
            if self.host_runs() {
                let message = "the host did not end within its budget; killing it";
                actions.push(Action::Log(Level::Warning, message.to_owned()));
                self.kill(now, actions);
            }
        }
        if self.may_leave_host() && self.gone_by.is_some_and(|at| at <= now) {
            return self.leave_host(actions);
        }
        if self.is_watched() && self.pipe_closed_until.is_some_and(|at| at <= now) {
            let message = "the host closed its input or output, but did not end".to_owned();
            return self.fail(message, now, actions);
        }
        match &mut self.phase {
            Phase::Waiting { at } if *at <= now => self.spawn(now, actions),
            Phase::GaveUp { until: Some(until) } if *until <= now => {
                self.respawn.grant(now);
                self.spawn(now, actions);
            }
            Phase::Starting { deadline } if *deadline <= now => {
                let seconds = self.rules.hello_wait / from_ms(1_000);
                self.fail(
                    format!("the host said no hello within {seconds} s"),
                    now,
                    actions,
                );
            }
            Phase::Ready { .. } if self.drain.is_none() => {
                if look.is_some_and(|look| self.watchdog.look(look, now)) {
                    let message = "the host hangs: no heartbeat in time".to_owned();
                    self.fail(message, now, actions);
                }
            }
            Phase::Failed { kill_at, .. } if kill_at.is_some_and(|at| at <= now) => {
                *kill_at = None;
                self.kill(now, actions);
            }
            Phase::Sweeping(sweep) if sweep.look_at <= now => {
                actions.push(if sweep.kill_at <= now {
                    Action::SignalSession(Signal::Kill)
                } else {
                    Action::CountSession
                });
            }
            Phase::Waiting { .. }
            | Phase::GaveUp { .. }
            | Phase::Starting { .. }
            | Phase::Ready { .. }
            | Phase::Failed { .. }
            | Phase::Sweeping(_)
            | Phase::Spawning
            | Phase::Registering
            | Phase::Over => {}
        }
    }

    fn spawn(&mut self, now: Nanos, actions: &mut Vec<Action>) {
        self.respawn.started(now);
        self.phase = Phase::Spawning;
        self.sent = 0;
        actions.push(Action::Spawn);
    }

    fn spawned(&mut self, now: Nanos, actions: &mut Vec<Action>) {
        self.phase = Phase::Starting {
            deadline: now + self.rules.hello_wait,
        };
        self.watchdog = Watchdog::new(0);
        self.pipe_closed_until = None;
        self.gone_by = None;
        if self.drain == Some(Drain::NoMore) {
            self.drain = None;
            self.terminate(now, actions);
        }
    }

    fn kill(&mut self, now: Nanos, actions: &mut Vec<Action>) {
        self.gone_by = Some(now + from_ms(KILL_WAIT_MS));
        actions.push(Action::SignalHost(Signal::Kill));
    }

    /// Whether the supervisor is to end, or to fail, so that a host which not even SIGKILL ends is
    /// waited for no longer. Else it is: no other may be started beside it.
    fn may_leave_host(&self) -> bool {
        self.host_runs() && (self.drain.is_some() || !self.had_host)
    }

    /// Ends a host that failed; what it owes is answered when it is gone.
    fn fail(&mut self, message: String, now: Nanos, actions: &mut Vec<Action>) {
        let hello_at = match self.phase {
            Phase::Ready { hello_at } => Some(hello_at),
            _ => None,
        };
        self.phase = Phase::Failed {
            kill_at: Some(now + from_ms(limits::TERMINATE_WAIT_MS)),
            hello_at,
        };
        self.trouble.clone_from(&message);
        actions.push(Action::Log(Level::Error, message));
        actions.push(Action::SignalHost(Signal::Terminate));
        actions.push(Action::SignalHost(Signal::Continue));
    }
}
