//! The end of the process: who asked for it first, and when it is over.
//!
//! Invariant: the first cause fixes reason and deadline; a later one changes nothing.
//! Invariant: the thread `deadline` reads one atomic and the clock, and takes no lock: whatever
//! the rest of the process is stuck in, it is over at the deadline.

use std::io;
use std::sync::Arc;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

use turnhost_protocol::limits;

/// Why the host ends: SPEC §8.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cause {
    /// SIGTERM, SIGINT or SIGHUP.
    Signal,
    /// Stdin was closed, or cannot be read.
    StdinClosed,
    /// Stdout was closed: nobody hears this host any more.
    StdoutClosed,
    /// A `shutdown` frame.
    Shutdown {
        /// Its budget, in milliseconds.
        wait_ms: u64,
    },
    /// The parent is gone.
    Orphan {
        /// The parent that was.
        old_ppid: i32,
        /// Who took its place.
        ppid: i32,
    },
}

impl Cause {
    /// The name in `end_reason`, behind `compute_host_`.
    #[must_use]
    pub fn reason(self) -> &'static str {
        match self {
            Self::Signal => "sigterm",
            Self::StdinClosed => "stdin_closed",
            Self::StdoutClosed => "stdout_closed",
            Self::Shutdown { .. } => "shutdown",
            Self::Orphan { .. } => "orphan",
        }
    }

    /// The whole time that the end may take.
    #[must_use]
    pub fn budget(self) -> Duration {
        Duration::from_millis(match self {
            Self::Signal | Self::Orphan { .. } => limits::SIGNAL_WAIT_MS,
            Self::StdinClosed | Self::StdoutClosed => limits::STDIN_CLOSED_WAIT_MS,
            Self::Shutdown { wait_ms } => wait_ms.max(limits::MIN_ENDING_MS),
        })
    }
}

/// The time that running turns get out of `budget`: all but the reserve for finalizing.
#[must_use]
pub fn drain_time(budget: Duration) -> Duration {
    budget - Duration::from_millis(limits::DRAIN_RESERVE_MS).min(budget / 2)
}

/// The switch that ends the process. Clones are the same switch.
#[derive(Clone)]
pub struct Ending {
    shared: Arc<Shared>,
}

struct Shared {
    epoch: Instant,
    /// 0, or the deadline in nanoseconds since `epoch`; never 0 once it is set.
    deadline_ns: AtomicU64,
    cause: OnceLock<Cause>,
    drain: OnceLock<Thread>,
    guard: OnceLock<Thread>,
}

impl Ending {
    /// Starts the thread that ends the process at the deadline, with exit code 0.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub fn start() -> io::Result<Self> {
        let shared = Arc::new(Shared {
            epoch: Instant::now(),
            deadline_ns: AtomicU64::new(0),
            cause: OnceLock::new(),
            drain: OnceLock::new(),
            guard: OnceLock::new(),
        });
        let watched = Arc::clone(&shared);
        let guard = thread::Builder::new()
            .name("deadline".into())
            .spawn(move || watched.guard())?;
        let _ = shared.guard.set(guard.thread().clone());
        Ok(Self { shared })
    }

    /// Begins the end, if nobody did before. Never waits.
    pub fn begin(&self, cause: Cause) {
        let shared = &*self.shared;
        let deadline = (shared.epoch.elapsed() + cause.budget()).as_nanos();
        let deadline = u64::try_from(deadline).unwrap_or(u64::MAX).max(1);
        let first =
            shared
                .deadline_ns
                .compare_exchange(0, deadline, Ordering::AcqRel, Ordering::Acquire);
        if first.is_err() {
            return;
        }
        // Only the first gets here, so this cell is never contended.
        let _ = shared.cause.set(cause);
        for thread in [&shared.guard, &shared.drain]
            .into_iter()
            .filter_map(OnceLock::get)
        {
            thread.unpark();
        }
    }

    /// Whether the end has begun: no turn is admitted any more.
    #[must_use]
    pub fn has_begun(&self) -> bool {
        self.shared.deadline_ns.load(Ordering::Acquire) != 0
    }

    /// Waits for the end to begin; answers why, and when it must be over. For the thread that
    /// drains.
    #[must_use]
    pub fn wait(&self) -> (Cause, Instant) {
        let _ = self.shared.drain.set(thread::current());
        loop {
            if let Some(cause) = self.shared.cause.get() {
                let deadline = self.shared.deadline_ns.load(Ordering::Acquire);
                return (*cause, self.shared.epoch + Duration::from_nanos(deadline));
            }
            thread::park();
        }
    }
}

impl Shared {
    fn guard(&self) {
        loop {
            match self.deadline_ns.load(Ordering::Acquire) {
                0 => thread::park(),
                deadline => {
                    let deadline = Duration::from_nanos(deadline);
                    match deadline.checked_sub(self.epoch.elapsed()) {
                        Some(left) if !left.is_zero() => thread::park_timeout(left),
                        _ => exit_now(),
                    }
                }
            }
        }
    }
}

/// Ends the process with exit code 0, running nothing that could wait for a lock.
pub(super) fn exit_now() -> ! {
    // SAFETY: `_exit` takes a number and never returns; it touches no memory of ours.
    unsafe { libc::_exit(0) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_reserve_is_a_second_and_never_more_than_half() {
        let check = |budget_ms, expected_ms| {
            let drain = drain_time(Duration::from_millis(budget_ms));
            assert_eq!(drain, Duration::from_millis(expected_ms), "{budget_ms}");
        };
        check(10_000, 9_000);
        check(2_000, 1_000);
        check(1_000, 500);
        check(340, 170);
        check(0, 0);
    }

    #[test]
    fn the_first_cause_decides() {
        let ending = Ending::start().unwrap();
        let before = Instant::now();
        ending.begin(Cause::Shutdown { wait_ms: 60_000 });
        ending.begin(Cause::StdinClosed);
        let (cause, deadline) = ending.wait();
        assert_eq!(
            (cause, cause.reason()),
            (Cause::Shutdown { wait_ms: 60_000 }, "shutdown")
        );
        assert!(deadline >= before + Duration::from_secs(60));
        // The deadline must not come while the tests run: it would end them all.
        ending.shared.deadline_ns.store(u64::MAX, Ordering::Release);
    }
}
