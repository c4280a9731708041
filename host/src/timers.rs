//! Things to do at a time, on a thread of their own.
//!
//! For what is short and may take the locks of sessions: activity frames, the patience of a
//! `session.close`. What must never be late (heartbeat, deadlines of the process) is not here.

use std::collections::BTreeMap;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread;
use std::time::Instant;

use parking_lot::{Condvar, Mutex};

type Action = Box<dyn FnOnce() + Send>;

/// A clock that calls back. Clones share their thread.
#[derive(Clone)]
pub struct Timers {
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// By time, then by the order in which they came.
    due: BTreeMap<(Instant, u64), Action>,
    next_number: u64,
}

impl Timers {
    /// Starts the thread, which lives as long as the process.
    ///
    /// # Errors
    /// It cannot be started.
    pub fn start() -> io::Result<Self> {
        let shared = Arc::new(Shared::default());
        let timers = Self {
            shared: Arc::clone(&shared),
        };
        thread::Builder::new()
            .name("timers".into())
            .spawn(move || run(&shared))?;
        Ok(timers)
    }

    /// Calls `action` at `time`, or soon after.
    pub fn at(&self, time: Instant, action: impl FnOnce() + Send + 'static) {
        let mut state = self.shared.state.lock();
        let number = state.next_number;
        state.next_number += 1;
        state.due.insert((time, number), Box::new(action));
        drop(state);
        self.shared.changed.notify_one();
    }
}

fn run(shared: &Shared) {
    let mut state = shared.state.lock();
    loop {
        match state.due.first_key_value().map(|((time, _), _)| *time) {
            None => shared.changed.wait(&mut state),
            Some(time) if time > Instant::now() => {
                // Whether the time came or something changed is looked at again either way.
                let _ = shared.changed.wait_until(&mut state, time);
            }
            Some(_) => {
                if let Some((_, action)) = state.due.pop_first() {
                    drop(state);
                    if catch_unwind(AssertUnwindSafe(action)).is_err() {
                        tracing::error!("a timed action panicked; the others go on");
                    }
                    state = shared.state.lock();
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn actions_run_in_the_order_of_their_times() {
        let timers = Timers::start().unwrap();
        let (tell, told) = std::sync::mpsc::channel();
        let now = Instant::now();
        for delay_ms in [30, 10, 20] {
            let tell = tell.clone();
            timers.at(now + Duration::from_millis(delay_ms), move || {
                tell.send(delay_ms).unwrap()
            });
        }
        let seen: Vec<u64> = told.iter().take(3).collect();
        assert_eq!(seen, [10, 20, 30]);
        assert!(now.elapsed() >= Duration::from_millis(30));
    }
}
