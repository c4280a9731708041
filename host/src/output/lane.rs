//! The output of one session, in order.
//!
//! Frames are encoded by the thread that produces them. While the parent keeps up each delta is a
//! frame of its own; once [`limits::SESSION_OUTPUT_BYTES`] wait, deltas are joined as text, and get
//! their `seq` when the writer takes them. So `seq` has no gap, whatever was joined.
//!
//! Invariant: behind `joined` nothing is queued; a frame that is not a delta of its kind flushes it.
//! Invariant: only the open turn appends; its terminal frame closes it, under the same lock.

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use turnhost_protocol::frame::output::{Output as Frame, delta_head, encode_delta};
use turnhost_protocol::json;
use turnhost_protocol::limits;
use turnhost_protocol::rpc::{Event, Message};

use super::Shared;
use super::chunks::Chunks;

/// Tells the turns of a host apart; never given twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TurnNumber(pub u64);

/// The turn has its terminal frame; nothing more of it is taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TurnClosed;

/// Kinds of streamed text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Delta {
    /// `message.delta`
    Message,
    /// `reasoning.delta`
    Reasoning,
}

/// The output of one session.
pub struct Lane {
    sid: Arc<str>,
    state: Mutex<State>,
    room: Condvar,
}

#[derive(Default)]
struct State {
    turn: Option<TurnNumber>,
    seq: u64,
    lines: Chunks,
    joined: Option<Joined>,
    /// Bytes that were ever put into `lines`, and of those the ones up to the end of the last
    /// activity frame: while that one waits, no other is needed.
    appended: u64,
    activity_end: u64,
    heads: [Option<Box<[u8]>>; 2],
    in_urgent: bool,
    in_deltas: bool,
}

struct Joined {
    kind: Delta,
    text: String,
}

impl Lane {
    pub(super) fn new(sid: Arc<str>) -> Self {
        Self {
            sid,
            state: Mutex::default(),
            room: Condvar::new(),
        }
    }

    /// The session.
    #[must_use]
    pub fn sid(&self) -> &Arc<str> {
        &self.sid
    }

    pub(super) fn open(&self, turn: TurnNumber) {
        self.state.lock().turn = Some(turn);
    }

    pub(super) fn wake(&self) {
        // The lock closes the gap between the waiter's look and its wait.
        drop(self.state.lock());
        self.room.notify_all();
    }

    /// Waits while this session's output, or all output together, is so much that turns may add no
    /// more; not where the turn has to `hurry`.
    pub(super) fn wait_for_room(
        &self,
        turn: TurnNumber,
        shared: &Shared,
        hurry: &impl Fn() -> bool,
    ) -> Result<(), TurnClosed> {
        loop {
            let mut state = self.state.lock();
            loop {
                state.must_be_open(turn)?;
                if state.has_room() || hurry() || shared.is_closed() {
                    break;
                }
                self.room.wait(&mut state);
            }
            drop(state);
            if !shared.is_crowded() || hurry() {
                return Ok(());
            }
            let is_over = |shared: &Shared| !shared.is_crowded() || hurry();
            shared.wait(Instant::now() + LOOK_AGAIN, is_over);
        }
    }

    pub(super) fn append(
        self: &Arc<Self>,
        turn: TurnNumber,
        shared: &Shared,
        frame: &Frame<'_>,
    ) -> Result<(), TurnClosed> {
        let mut state = self.state.lock();
        state.must_be_open(turn)?;
        state.push_frame(&self.sid, shared, frame);
        self.schedule(&mut state, shared);
        Ok(())
    }

    pub(super) fn append_event(
        self: &Arc<Self>,
        turn: TurnNumber,
        shared: &Shared,
        event: Event<'_>,
    ) -> Result<(), TurnClosed> {
        let mut state = self.state.lock();
        state.must_be_open(turn)?;
        state.push_event(&self.sid, shared, event);
        self.schedule(&mut state, shared);
        Ok(())
    }

    pub(super) fn append_delta(
        self: &Arc<Self>,
        turn: TurnNumber,
        shared: &Shared,
        kind: Delta,
        text: &str,
    ) -> Result<(), TurnClosed> {
        let mut state = self.state.lock();
        state.must_be_open(turn)?;
        if shared.is_closed() {
            return Ok(());
        }
        let State { joined, lines, .. } = &mut *state;
        match joined {
            Some(joined) if joined.kind == kind => {
                joined.text.push_str(text);
                shared.add(text.len());
            }
            None if lines.bytes() >= limits::SESSION_OUTPUT_BYTES => {
                *joined = Some(Joined {
                    kind,
                    text: text.to_owned(),
                });
                shared.add(text.len());
            }
            _ => {
                state.flush_joined(&self.sid, shared);
                state.push_delta(&self.sid, shared, kind, text);
            }
        }
        self.schedule(&mut state, shared);
        Ok(())
    }

    /// Appends a frame that is no part of a turn.
    pub(super) fn append_reply(self: &Arc<Self>, shared: &Shared, frame: &Frame<'_>) {
        let mut state = self.state.lock();
        state.push_frame(&self.sid, shared, frame);
        self.schedule(&mut state, shared);
    }

    pub(super) fn append_activity(
        self: &Arc<Self>,
        turn: TurnNumber,
        shared: &Shared,
        frame: &Frame<'_>,
    ) {
        let mut state = self.state.lock();
        let taken = state.appended - state.lines.bytes() as u64;
        if state.must_be_open(turn).is_err() || taken < state.activity_end {
            return;
        }
        state.push_frame(&self.sid, shared, frame);
        state.activity_end = state.appended;
        self.schedule(&mut state, shared);
    }

    pub(super) fn close(
        self: &Arc<Self>,
        shared: &Shared,
        events: Vec<Event<'_>>,
        terminal: &Frame<'_>,
    ) {
        let mut state = self.state.lock();
        for event in events {
            state.push_event(&self.sid, shared, event);
        }
        state.push_frame(&self.sid, shared, terminal);
        state.turn = None;
        self.schedule(&mut state, shared);
        self.room.notify_all();
    }

    /// Puts the lane into the lists where it belongs and is not yet.
    fn schedule(self: &Arc<Self>, state: &mut State, shared: &Shared) {
        let urgent = state.lines.is_urgent();
        let missing = if urgent {
            !state.in_urgent
        } else {
            !state.in_deltas && !state.in_urgent
        };
        if !missing || state.is_empty() {
            return;
        }
        let mut schedule = shared.schedule.lock();
        if urgent {
            state.in_urgent = true;
            schedule.urgent.push_back(Arc::clone(self));
        } else {
            state.in_deltas = true;
            schedule.deltas.push_back(Arc::clone(self));
        }
        drop(schedule);
        shared.wake();
    }

    /// Moves the oldest lines to `batch`; called by the writer for a lane that it took from the
    /// list of the `urgent` ones or from the other one.
    pub(super) fn take(self: &Arc<Self>, shared: &Shared, urgent: bool, batch: &mut Vec<u8>) {
        let mut state = self.state.lock();
        if urgent {
            state.in_urgent = false;
        } else {
            state.in_deltas = false;
        }
        if state.lines.is_empty() {
            state.flush_joined(&self.sid, shared);
        }
        if let Some(lines) = state.lines.pop() {
            if batch.is_empty() {
                *batch = lines;
            } else {
                batch.extend_from_slice(&lines);
            }
        }
        self.schedule(&mut state, shared);
        if state.has_room() {
            self.room.notify_all();
        }
    }
}

impl State {
    fn must_be_open(&self, turn: TurnNumber) -> Result<(), TurnClosed> {
        if self.turn == Some(turn) {
            Ok(())
        } else {
            Err(TurnClosed)
        }
    }

    fn is_empty(&self) -> bool {
        self.lines.is_empty() && self.joined.is_none()
    }

    /// Frames may be added until deltas are joined, and those until a good part is.
    fn has_room(&self) -> bool {
        match &self.joined {
            Some(joined) => joined.text.len() < limits::JOINED_TEXT_BYTES,
            None => self.lines.bytes() < 2 * limits::SESSION_OUTPUT_BYTES,
        }
    }

    fn push_event(&mut self, sid: &str, shared: &Shared, event: Event<'_>) {
        // What was joined comes first and takes its number first.
        self.flush_joined(sid, shared);
        self.seq += 1;
        let message = Message::Event {
            sid,
            event,
            seq: self.seq,
        };
        self.push_frame(sid, shared, &Frame::Rpc { sid, message });
    }

    fn push_frame(&mut self, sid: &str, shared: &Shared, frame: &Frame<'_>) {
        self.flush_joined(sid, shared);
        if shared.is_closed() {
            return;
        }
        let bytes = self
            .lines
            .append(true, |line| frame.encode(shared.max_frame_bytes, line));
        self.appended += bytes as u64;
        shared.add(bytes);
    }

    fn push_delta(&mut self, sid: &str, shared: &Shared, kind: Delta, text: &str) {
        let (slot, name) = match kind {
            Delta::Message => (0, "message.delta"),
            Delta::Reasoning => (1, "reasoning.delta"),
        };
        let head = self.heads[slot].get_or_insert_with(|| delta_head(sid, name).into());
        // JSON escaping makes a character six times as long at worst.
        let longest = shared
            .max_frame_bytes
            .saturating_sub(head.len() + MAX_DELTA_TAIL_BYTES)
            / 6;
        let mut rest = text;
        while !rest.is_empty() {
            let part = match json::prefix(rest, limits::MAX_DELTA_BYTES.min(longest)) {
                // Not even one character would fit: it goes out all the same.
                "" => rest,
                part => part,
            };
            rest = &rest[part.len()..];
            self.seq += 1;
            let seq = self.seq;
            let bytes = self
                .lines
                .append(false, |line| encode_delta(head, part, seq, line));
            self.appended += bytes as u64;
            shared.add(bytes);
        }
    }

    fn flush_joined(&mut self, sid: &str, shared: &Shared) {
        if let Some(Joined { kind, text }) = self.joined.take() {
            self.push_delta(sid, shared, kind, &text);
            shared.take_off(text.len());
        }
    }
}

/// How long a turn waits for all output together before it looks at its own state again.
const LOOK_AGAIN: Duration = Duration::from_secs(1);

/// `},"seq":…}},"host_ns":…}` with two numbers of 20 digits.
const MAX_DELTA_TAIL_BYTES: usize = 64;
