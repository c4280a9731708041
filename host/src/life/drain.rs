//! The drain: turns finish or are told, sessions are finalized, output is written: SPEC §8.

use std::io;
use std::thread;

use turnhost_protocol::frame::output::{Output as Frame, Reason};

use super::ending::{Cause, Ending, drain_time, exit_now};
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
        if let Cause::Orphan { old_ppid, ppid } = cause {
            // Somebody else may still hold the other end.
            self.output.reply(&Frame::Orphan { old_ppid, ppid });
            self.output.flush();
        }
        tracing::info!(reason = cause.reason(), "draining");

        // Turns that were accepted may still begin: somebody was promised them.
        self.sessions.begin_drain();
        let still_live = self.sessions.wait_until_settled(turns_until);
        for turn in &still_live {
            // One that waits for a worker never runs now; one that has begun says so itself.
            let _ = self.pool.withdraw(turn.number.0);
            let message = "the host ended before the turn did".to_owned();
            self.sessions.settle(
                turn,
                Terminal::Error {
                    reason: Reason::Draining,
                    message,
                },
            );
        }
        let began: Vec<_> = still_live
            .into_iter()
            .filter(|turn| turn.is_started())
            .collect();
        let end_reason = format!("compute_host_{}", cause.reason());
        self.sessions.finalize_all(&began, &end_reason);
        if !self.output.finish(deadline) {
            tracing::warn!("the parent did not take all output before the deadline");
        }
        self.log.finish(deadline);
        exit_now();
    }
}
