//! When a host that ended is started again, and when no more.
//!
//! Pure: time is a number. Invariant: without [`Respawn::forget`] and without a stable life, at
//! most `max` restarts are granted in any window.

use std::collections::VecDeque;

use turnhost_protocol::limits;

use super::{Nanos, from_ms};

/// The numbers of SPEC §9, changed only by `--respawn-max` and by tests.
#[derive(Debug, Clone)]
pub struct RespawnRules {
    /// Restarts that one window may see.
    pub max: usize,
    /// The first delay; it doubles with each restart in the window.
    pub first_delay_ms: u64,
    /// The longest delay.
    pub max_delay_ms: u64,
    /// Length of the sliding window.
    pub window_ms: u64,
    /// A life after hello that refills the budget.
    pub stable_ms: u64,
}

impl Default for RespawnRules {
    fn default() -> Self {
        Self {
            max: limits::RESPAWN_MAX,
            first_delay_ms: limits::RESPAWN_DELAY_MS,
            max_delay_ms: limits::MAX_RESPAWN_DELAY_MS,
            window_ms: limits::RESPAWN_WINDOW_MS,
            stable_ms: limits::STABLE_MS,
        }
    }
}

/// What follows an exit that nobody asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Verdict {
    /// Start again after a delay.
    Retry { delay_ms: u64 },
    /// Stop trying, until the window has room again where it ever will.
    GiveUp { until: Option<Nanos> },
}

/// The budget of restarts.
#[derive(Debug)]
pub(super) struct Respawn {
    rules: RespawnRules,
    /// When the granted restarts happen, oldest first.
    granted: VecDeque<Nanos>,
}

impl Respawn {
    pub(super) fn new(rules: RespawnRules) -> Self {
        Self {
            rules,
            granted: VecDeque::new(),
        }
    }

    /// Decides about an exit; `hello_at` is when that host said hello, if it did. A retry counts.
    pub(super) fn after_exit(&mut self, now: Nanos, hello_at: Option<Nanos>) -> Verdict {
        let stable = from_ms(self.rules.stable_ms);
        if hello_at.is_some_and(|hello_at| now.saturating_sub(hello_at) >= stable) {
            self.granted.clear();
        }
        let window = from_ms(self.rules.window_ms);
        while self.granted.front().is_some_and(|at| at + window <= now) {
            self.granted.pop_front();
        }
        if self.granted.len() >= self.rules.max {
            let until = self.granted.front().map(|at| at + window);
            return Verdict::GiveUp { until };
        }
        let doublings = u32::try_from(self.granted.len()).unwrap_or(u32::MAX);
        let factor = 1_u64.checked_shl(doublings).unwrap_or(u64::MAX);
        let delay_ms = self.rules.first_delay_ms.saturating_mul(factor);
        let delay_ms = delay_ms.min(self.rules.max_delay_ms);
        self.granted.push_back(now + from_ms(delay_ms));
        Verdict::Retry { delay_ms }
    }

    /// Counts a restart that is granted because the window has room again.
    pub(super) fn grant(&mut self, now: Nanos) {
        self.granted.pop_front();
        self.granted.push_back(now);
    }

    /// The restart that was granted last happens now, perhaps later than planned.
    pub(super) fn started(&mut self, now: Nanos) {
        if let Some(last) = self.granted.back_mut() {
            *last = now.max(*last);
        }
    }

    /// A person asked for a host: the budget starts anew.
    pub(super) fn forget(&mut self) {
        self.granted.clear();
    }

    /// Restarts that count against the budget.
    pub(super) fn granted(&self) -> usize {
        self.granted.len()
    }

    /// The budget and its window, for a sentence.
    pub(super) fn rules(&self) -> &RespawnRules {
        &self.rules
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Nanos = 1_000_000_000;

    fn delays(respawn: &mut Respawn, times: &[Nanos]) -> Vec<Option<u64>> {
        times
            .iter()
            .map(|at| match respawn.after_exit(*at, None) {
                Verdict::Retry { delay_ms } => Some(delay_ms),
                Verdict::GiveUp { .. } => None,
            })
            .collect()
    }

    #[test]
    fn the_delay_doubles_up_to_its_limit() {
        let rules = RespawnRules {
            max: 100,
            ..RespawnRules::default()
        };
        let mut respawn = Respawn::new(rules);
        let seen = delays(&mut respawn, &[0, 1, 2, 3, 4, 5, 6]);
        let expected = [250, 500, 1000, 2000, 4000, 5000, 5000].map(Some);
        assert_eq!(seen, expected);
        assert_eq!(delays(&mut respawn, &[7; 90])[89], Some(5000));
    }

    #[test]
    fn the_window_slides() {
        let mut respawn = Respawn::new(RespawnRules::default());
        let times = [0, 100 * SECOND, 200 * SECOND];
        assert!(delays(&mut respawn, &times).iter().all(Option::is_some));
        // The first restart itself came a quarter of a second after its exit.
        let until = 300 * SECOND + SECOND / 4;
        assert_eq!(
            respawn.after_exit(300 * SECOND, None),
            Verdict::GiveUp { until: Some(until) }
        );
        assert!(delays(&mut respawn, &[until])[0].is_some());
        assert!(delays(&mut respawn, &[until + SECOND])[0].is_none());
    }

    #[test]
    fn sixty_stable_seconds_refill_the_budget() {
        let mut respawn = Respawn::new(RespawnRules::default());
        delays(&mut respawn, &[0, 1, 2]);
        let hello_at = Some(3);
        assert!(matches!(
            respawn.after_exit(3 + 59 * SECOND, hello_at),
            Verdict::GiveUp { .. }
        ));
        assert_eq!(
            respawn.after_exit(3 + 60 * SECOND, hello_at),
            Verdict::Retry { delay_ms: 250 }
        );
        assert_eq!(respawn.granted(), 1);
    }

    #[test]
    fn no_restart_at_all_is_a_budget_too() {
        let rules = RespawnRules {
            max: 0,
            ..RespawnRules::default()
        };
        assert_eq!(
            Respawn::new(rules).after_exit(0, None),
            Verdict::GiveUp { until: None }
        );
    }
}
