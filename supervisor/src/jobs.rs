//! What waits for the thread that runs foreign code.
//!
//! Bounded by bytes, so that a slow sink holds up the host and not the memory; but an answer that
//! somebody waits for is never held up, since that somebody may be the foreign code itself.

use std::collections::VecDeque;

use parking_lot::{Condvar, Mutex};

use crate::supervisor::{Callback, HostFrame};

/// Bytes of frames that wait for foreign code before further frames wait in their pipe.
const WAITING_BYTES: usize = 64 << 20;

/// The same while somebody waits for an answer, which may be behind them.
const WAITING_BYTES_BEFORE_ANSWER: usize = 4 * WAITING_BYTES;

/// What a frame that waits takes beside its bytes.
const JOB_BYTES: usize = 256;

/// Foreign code and what it is called with.
pub(crate) enum Job {
    Callback(Callback, HostFrame),
    Sink(HostFrame),
}

impl Job {
    fn bytes(&self) -> usize {
        let (Self::Callback(_, frame) | Self::Sink(frame)) = self;
        frame.line().len() + JOB_BYTES
    }
}

/// Foreign code that waits for its thread.
#[derive(Default)]
pub(crate) struct Jobs {
    state: Mutex<JobsState>,
    /// There is a job, or no further one comes.
    some: Condvar,
    /// There is room, or somebody waits for an answer.
    room: Condvar,
}

#[derive(Default)]
struct JobsState {
    waiting: VecDeque<Job>,
    bytes: usize,
    /// Callers that wait for an answer.
    callers: usize,
    ended: bool,
}

impl JobsState {
    fn is_full(&self) -> bool {
        let limit = if self.callers > 0 {
            WAITING_BYTES_BEFORE_ANSWER
        } else {
            WAITING_BYTES
        };
        self.bytes >= limit
    }
}

impl Jobs {
    /// Waits for room, but not while a caller waits for an answer: it may be foreign code itself.
    pub(crate) fn push(&self, job: Job) {
        let mut state = self.state.lock();
        while state.is_full() && !state.ended {
            self.room.wait(&mut state);
        }
        state.bytes += job.bytes();
        state.waiting.push_back(job);
        drop(state);
        self.some.notify_one();
    }

    /// The next one; `None` after the last.
    pub(crate) fn next(&self) -> Option<Job> {
        let mut state = self.state.lock();
        loop {
            if let Some(job) = state.waiting.pop_front() {
                state.bytes -= job.bytes();
                drop(state);
                self.room.notify_one();
                return Some(job);
            }
            if state.ended {
                return None;
            }
            self.some.wait(&mut state);
        }
    }

    pub(crate) fn end(&self) {
        self.state.lock().ended = true;
        self.some.notify_all();
        self.room.notify_all();
    }

    /// Counts a caller as long as the answer lives.
    pub(crate) fn caller(&self) -> WaitingCaller<'_> {
        self.state.lock().callers += 1;
        self.room.notify_one();
        WaitingCaller(self)
    }
}

/// Somebody who waits for an answer, as long as it lives.
pub(crate) struct WaitingCaller<'a>(&'a Jobs);

impl Drop for WaitingCaller<'_> {
    fn drop(&mut self) {
        self.0.state.lock().callers -= 1;
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::thread;

    use super::*;
    use crate::supervisor::frame_of;

    #[test]
    fn frames_wait_for_foreign_code_but_not_before_an_answer() {
        let shared = Arc::new(Jobs::default());
        let job = || Job::Sink(frame_of(&vec![b'x'; WAITING_BYTES / 2]));
        shared.push(job());
        shared.push(job());
        assert!(shared.state.lock().is_full());
        let caller = shared.caller();
        assert!(!shared.state.lock().is_full());
        shared.push(job());
        drop(caller);
        assert!(shared.state.lock().is_full());
        let jobs = Arc::clone(&shared);
        let last = thread::spawn(move || jobs.push(job()));
        assert!(shared.next().is_some() && shared.next().is_some());
        last.join().unwrap();
        shared.end();
        assert!(shared.next().is_some() && shared.next().is_some());
        assert!(shared.next().is_none());
    }
}
