//! When a host counts as hanging.
//!
//! Pure: it is told of frames and of looks at the host, and adds up time in which the host was
//! seen to be silent. Invariant: time that nobody watched (the supervisor was stopped or starved,
//! or did not read because the gateway did not) counts at most as one look.

use turnhost_protocol::limits::{BEATLESS_INTERVALS, SILENT_INTERVALS};

use super::Nanos;

/// One look at a running host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HostLook {
    /// The supervisor reads, and just found nothing to read.
    pub silent: bool,
    /// CPU time that the host's process has used so far. `None` counts as work: for a process that
    /// cannot be read, or one that is runnable and waits for a CPU.
    pub cpu_ticks: Option<u64>,
}

/// Looks in one interval. More of them make the sum finer, each costs one read of `/proc`.
const LOOKS_PER_INTERVAL: u64 = 4;

#[derive(Debug)]
pub(super) struct Watchdog {
    interval: Nanos,
    /// No heartbeat, no hang: a host without them is not watched.
    armed: bool,
    last_look: Nanos,
    cpu_ticks: Option<u64>,
    /// Watched time without any frame and without CPU time.
    silent: Nanos,
    /// Watched time without a heartbeat.
    beatless: Nanos,
}

impl Watchdog {
    pub(super) fn new(interval: Nanos) -> Self {
        Self {
            interval,
            armed: false,
            last_look: 0,
            cpu_ticks: None,
            silent: 0,
            beatless: 0,
        }
    }

    /// The host wrote a frame.
    pub(super) fn saw_frame(&mut self, is_heartbeat: bool, now: Nanos) {
        self.silent = 0;
        if is_heartbeat {
            self.beatless = 0;
            if !self.armed {
                self.armed = self.interval > 0;
                self.last_look = now;
            }
        }
    }

    /// When the next look is due.
    pub(super) fn next_look(&self) -> Option<Nanos> {
        self.armed
            .then(|| self.last_look + self.interval / LOOKS_PER_INTERVAL)
    }

    /// Takes a look into account; answers whether the host hangs.
    pub(super) fn look(&mut self, look: HostLook, now: Nanos) -> bool {
        if self.next_look().is_none_or(|due| now < due) {
            return false;
        }
        let elapsed = now - self.last_look;
        self.last_look = now;
        let used_cpu = look.cpu_ticks.is_none() || look.cpu_ticks != self.cpu_ticks;
        self.cpu_ticks = look.cpu_ticks;
        if !look.silent {
            return false;
        }
        let watched = elapsed.min(2 * self.interval / LOOKS_PER_INTERVAL);
        self.beatless += watched;
        self.silent = if used_cpu { 0 } else { self.silent + watched };
        self.silent >= u64::from(SILENT_INTERVALS) * self.interval
            || self.beatless >= u64::from(BEATLESS_INTERVALS) * self.interval
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const INTERVAL: Nanos = 1_000;

    /// Looks every quarter of an interval until a hang; answers the intervals it took.
    fn until_hang(mut at: impl FnMut(u64, &mut Watchdog) -> HostLook) -> Option<u64> {
        let mut watchdog = Watchdog::new(INTERVAL);
        watchdog.saw_frame(true, 0);
        (1..=200).find_map(|index| {
            let now = index * INTERVAL / 4;
            let look = at(index, &mut watchdog);
            watchdog.look(look, now).then_some(index / 4)
        })
    }

    fn silent(cpu_ticks: u64) -> HostLook {
        HostLook {
            silent: true,
            cpu_ticks: Some(cpu_ticks),
        }
    }

    #[test]
    fn silence_without_cpu_time_is_a_hang_after_three_intervals() {
        assert_eq!(until_hang(|_, _| silent(7)), Some(3));
    }

    #[test]
    fn work_without_heartbeats_is_a_hang_after_twenty() {
        assert_eq!(until_hang(|index, _| silent(index)), Some(20));
        assert_eq!(
            until_hang(|index, watchdog| {
                watchdog.saw_frame(false, index * INTERVAL / 4);
                silent(7)
            }),
            Some(20)
        );
        let unreadable = HostLook {
            silent: true,
            cpu_ticks: None,
        };
        assert_eq!(until_hang(|_, _| unreadable), Some(20));
    }

    #[test]
    fn a_host_that_beats_or_is_not_read_is_fine() {
        assert_eq!(
            until_hang(|index, watchdog| {
                if index % 4 == 0 {
                    watchdog.saw_frame(true, index * INTERVAL / 4);
                }
                silent(7)
            }),
            None
        );
        let unread = HostLook {
            silent: false,
            cpu_ticks: Some(7),
        };
        assert_eq!(until_hang(|_, _| unread), None);
    }

    #[test]
    fn only_a_heartbeat_arms_it() {
        let mut watchdog = Watchdog::new(INTERVAL);
        watchdog.saw_frame(false, 0);
        assert_eq!(watchdog.next_look(), None);
        assert!(!watchdog.look(silent(7), 1_000 * INTERVAL));
        let mut off = Watchdog::new(0);
        off.saw_frame(true, 0);
        assert_eq!(off.next_look(), None);
    }

    #[test]
    fn unwatched_time_counts_as_one_look() {
        let mut watchdog = Watchdog::new(INTERVAL);
        watchdog.saw_frame(true, 0);
        watchdog.look(silent(7), INTERVAL / 4);
        assert!(!watchdog.look(silent(7), 1_000 * INTERVAL));
        assert!(!watchdog.look(silent(7), 1_000 * INTERVAL + INTERVAL / 4));
    }
}
