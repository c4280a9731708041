//! The wish that a turn ends.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

/// Set once, by an interrupt; seen by the turn at its next step, or at once where it waits.
#[derive(Clone, Default)]
pub struct Cancel {
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Shared {
    set: AtomicBool,
    lock: Mutex<()>,
    changed: Condvar,
}

impl Cancel {
    /// Asks the turn to end.
    pub fn set(&self) {
        self.shared.set.store(true, Ordering::Release);
        // The lock closes the gap between a waiter's look and its wait.
        drop(self.shared.lock.lock());
        self.shared.changed.notify_all();
    }

    /// Whether the turn was asked to end.
    #[must_use]
    pub fn is_set(&self) -> bool {
        self.shared.set.load(Ordering::Acquire)
    }

    /// Waits for `duration`, or until the turn is asked to end; answers whether it was.
    #[must_use]
    pub fn wait(&self, duration: Duration) -> bool {
        let deadline = Instant::now() + duration;
        let mut lock = self.shared.lock.lock();
        while !self.is_set() {
            if self
                .shared
                .changed
                .wait_until(&mut lock, deadline)
                .timed_out()
            {
                return self.is_set();
            }
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_ends_when_it_is_set() {
        let cancel = Cancel::default();
        assert!(!cancel.wait(Duration::ZERO));
        let other = cancel.clone();
        let waiter = std::thread::spawn(move || other.wait(Duration::from_secs(3600)));
        cancel.set();
        assert!(waiter.join().unwrap() && cancel.wait(Duration::from_secs(3600)));
    }
}
