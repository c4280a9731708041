//! Sessions: which are live, which turn each has, and what was said in them.
//!
//! May use `output`, `cancel` and `protocol`.
//!
//! Invariant: the table's lock is held for bookkeeping and for appending to a lane, which never
//! waits; never while an agent or a file is at work. A conversation's lock may be taken under it.
//! Invariant: a turn's claim on its session and its terminal frame end in one step, so a gateway
//! that has read the frame is never told `session busy` because of it, and no turn has two.

mod conversation;
mod table;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use turnhost_protocol::frame::RequestId;
use turnhost_protocol::process::monotonic_ns;

use crate::cancel::Cancel;
use crate::output::{Port, TurnNumber};

pub use conversation::{Conversation, Exchange, Profile, Setup};
pub use table::{AtTheDoor, Closing, Sessions, Terminal};

/// A turn from its admission to its terminal frame.
pub struct Turn {
    /// Its number in this host.
    pub number: TurnNumber,
    /// Its session.
    pub sid: Arc<str>,
    /// The id of its `turn.start`.
    pub request_id: RequestId,
    /// The gateway's name for it; asks for activity frames.
    pub turn_id: Option<String>,
    /// Its `queued_prompt_generation`.
    pub generation: Option<i64>,
    /// Set by an interrupt.
    pub cancel: Cancel,
    /// Where its frames go.
    pub port: Port,
    /// What it continues.
    pub conversation: Arc<Conversation>,
    started: AtomicBool,
    progress_ns: AtomicU64,
}

impl Turn {
    /// Whether a part of it ran.
    #[must_use]
    pub fn is_started(&self) -> bool {
        self.started.load(Ordering::Acquire)
    }

    /// Notes that its agent made progress just now.
    pub fn note_progress(&self) {
        self.progress_ns.store(monotonic_ns(), Ordering::Relaxed);
    }

    /// When its agent last made progress, on CLOCK_MONOTONIC in nanoseconds.
    #[must_use]
    pub fn progress_ns(&self) -> Option<u64> {
        Some(self.progress_ns.load(Ordering::Relaxed)).filter(|time| *time > 0)
    }

    /// Whether the turn should not wait for a slow parent.
    #[must_use]
    pub fn hurries(&self) -> bool {
        self.cancel.is_set()
    }
}
