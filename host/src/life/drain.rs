//! The drain: turns finish or are told, sessions are finalized, output is written: SPEC §8.

use std::io;
use std::thread;

use turnhost_protocol::frame::output::Reason;

use super::ending::{Ending, drain_time, exit_now};
use crate::log::Log;
use crate::output::Output;
use crate::pool::Pool;
use crate::session::{Sessions, Terminal};

/// What the drain needs.
pub struct Drain {
    /// Tells when it begins.
    pub ending: Ending,
    /// Whose turns are live.
    pub sessions: Sessions,
    /// What is queued.
    pub pool: Pool,
    /// What has to be written.
    pub output: Output,
    /// What was logged.
    pub log: Log,
}

impl Drain {
    /// Starts the thread that waits for the end and sees to it; it ends the process.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub fn start(self) -> io::Result<()> {
        thread::Builder::new()
            .name("drain".into())
            .spawn(move || self.run())?;
        Ok(())
    }

    fn run(self) {
        let (cause, deadline) = self.ending.wait();
        let turns_until = deadline - (cause.budget() - drain_time(cause.budget()));
        tracing::info!(reason = cause.reason(), "draining");

        // Turns that were accepted may still begin: somebody was promised them.
        self.sessions.begin_drain();
        let mut still_live = self.sessions.wait_until_settled(turns_until);
        still_live.retain(|turn| {
            // It waits for a worker: it is certain that nothing of it ran, and nothing will.
            let never_ran = self.pool.withdraw(turn.number.0);
            // A worker has it: only that worker knows whether it began.
            if !never_ran {
                turn.set_started();
            }
            let message = "the host ended before the turn did".to_owned();
            self.sessions.settle(
                turn,
                Terminal::Error {
                    reason: Reason::Draining,
                    message,
                },
            );
            !never_ran
        });
        let end_reason = format!("compute_host_{}", cause.reason());
        self.sessions.finalize_all(&still_live, &end_reason);
        if !self.output.finish(deadline) {
            tracing::warn!("the parent did not take all output before the deadline");
        }
        self.log.finish(deadline);
        exit_now();
    }
}
