//! What a heartbeat says; everything is read without a lock.

use turnhost_protocol::frame::output::{Heartbeat, Output as Frame};
use turnhost_protocol::process;

use crate::output::Output;
use crate::pool::Pool;
use crate::session::Sessions;

/// Where the numbers of a heartbeat come from.
pub struct Pulse {
    /// Turns.
    pub pool: Pool,
    /// Sessions.
    pub sessions: Sessions,
    /// Where it goes.
    pub output: Output,
}

impl Pulse {
    /// Sends one heartbeat.
    pub fn beat(&self) {
        let load = self.pool.load();
        self.output.heartbeat(&Frame::Heartbeat(Heartbeat {
            active_turns: load.active,
            waiting_turns: load.waiting,
            queued_turns: load.queued,
            // No room of this version asks a person anything.
            open_requests: 0,
            sessions: self.sessions.live_count(),
            progress_counter: self.sessions.finished_turns(),
            // Without /proc there is no number to give.
            rss_mb: process::resident_mib(std::process::id()).unwrap_or_default(),
        }));
    }
}
