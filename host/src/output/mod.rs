//! Frames to stdout: the only way out.
//!
//! May use `protocol` and nothing else of the host, so that every room may use it.
//!
//! Two kinds of queues lead to the one writer:
//!
//! - **replies**: answers of the reader, in their order.
//! - one **lane** for each session: its stream of turn frames and events (`lane`). Lanes that
//!   hold more than deltas go before those that do not.
//!
//! A thread that has nothing more to say just now may write what is queued itself, when the writer
//! is idle and the pipe takes it at once ([`Output::flush`]): that saves the way over the writer.
//!
//! Invariant: nothing but the holder of `stdout` writes, and it takes from the queues only while it
//! holds it; so what is taken earlier is written earlier.
//! Invariant: no lock is held while a thread writes or waits, except `stdout` itself.
//! Invariant: locks are taken in the order stdout, lanes, lane, schedule; `replies` and `room` are
//! leaves.
//! Invariant: replies, terminal frames and requests are never dropped and never wait for room.

mod chunks;
mod lane;
mod writer;

use std::collections::{HashMap, VecDeque};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::Thread;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use turnhost_protocol::frame::output::Output as Frame;
use turnhost_protocol::limits;

use chunks::Chunks;
pub use lane::{Delta, Lane, TurnClosed, TurnNumber};

/// Sessions whose lane is kept after their end, so that a session that comes back under its `sid`
/// goes on counting where it was.
const REMEMBERED_LANES: usize = 4 * limits::MAX_LIVE_SESSIONS;

/// The way out. Clones lead to the same writer.
#[derive(Clone)]
pub struct Output {
    shared: Arc<Shared>,
}

struct Shared {
    max_frame_bytes: usize,
    stdout: Mutex<OwnedFd>,
    replies: Mutex<Chunks>,
    /// The newest heartbeat that was not written yet: a box, or null. A pointer, so that neither
    /// side ever waits for the other.
    heartbeat: AtomicPtr<Vec<u8>>,
    schedule: Mutex<Schedule>,
    lanes: Mutex<HashMap<Arc<str>, Arc<Lane>>>,
    /// Bytes that are queued or being written.
    unread: AtomicUsize,
    room: Mutex<()>,
    room_made: Condvar,
    /// Threads that wait for room.
    waiting: AtomicUsize,
    /// The parent closed its end: everything is dropped from then on.
    closed: AtomicBool,
    writer: OnceLock<Thread>,
    /// Set by whoever queued something since the writer last looked.
    work: AtomicBool,
}

/// Lanes that wait for the writer. A lane may stand in both lists; it is in each at most once.
#[derive(Default)]
struct Schedule {
    urgent: VecDeque<Arc<Lane>>,
    deltas: VecDeque<Arc<Lane>>,
}

impl Output {
    /// Starts the writer thread on `stdout`. `on_closed` is called once, from any thread, when the
    /// parent no longer takes output.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub fn start(
        stdout: OwnedFd,
        max_frame_bytes: usize,
        on_closed: impl Fn() + Send + Sync + 'static,
    ) -> std::io::Result<Self> {
        let shared = Arc::new(Shared {
            max_frame_bytes,
            stdout: Mutex::new(stdout),
            replies: Mutex::default(),
            heartbeat: AtomicPtr::default(),
            schedule: Mutex::default(),
            lanes: Mutex::default(),
            unread: AtomicUsize::new(0),
            room: Mutex::new(()),
            room_made: Condvar::new(),
            waiting: AtomicUsize::new(0),
            closed: AtomicBool::new(false),
            writer: OnceLock::new(),
            work: AtomicBool::new(false),
        });
        writer::start(Arc::clone(&shared), on_closed)?;
        Ok(Self { shared })
    }

    /// Queues an answer of the reader. It goes out at the next [`Self::flush`], or earlier.
    pub fn reply(&self, frame: &Frame<'_>) {
        let shared = &*self.shared;
        if shared.is_closed() {
            return;
        }
        let full = {
            let mut replies = shared.replies.lock();
            let bytes = replies.append(true, |buffer| frame.encode(shared.max_frame_bytes, buffer));
            shared.add(bytes);
            replies.bytes() >= limits::WRITE_BYTES
        };
        if full {
            shared.wake();
        }
    }

    /// Queues an answer that belongs to the stream of a session, behind what that holds already.
    pub fn session_reply(&self, lane: &Arc<Lane>, frame: &Frame<'_>) {
        lane.append_reply(&self.shared, frame);
    }

    /// Sends what is queued on its way, by the short one if that cannot block: the calling thread
    /// writes it. For threads that have nothing more to say just now.
    pub fn flush(&self) {
        let shared = &*self.shared;
        if shared.unread() > 0 && !writer::try_write(shared) {
            shared.wake();
        }
    }

    /// Leaves what is queued to the writer; for threads that must not take a lane's lock.
    pub fn wake(&self) {
        self.shared.wake();
    }

    /// Replaces the heartbeat that waits, if one does. Takes no lock.
    pub fn heartbeat(&self, frame: &Frame<'_>) {
        let mut line = Vec::new();
        frame.encode(self.shared.max_frame_bytes, &mut line);
        let newest = Box::into_raw(Box::new(line));
        let older = self.shared.heartbeat.swap(newest, Ordering::AcqRel);
        if !older.is_null() {
            // SAFETY: the pointer came from `Box::into_raw`, and the swap made it ours alone.
            drop(unsafe { Box::from_raw(older) });
        }
        self.shared.wake();
    }

    /// The lane of the session `sid`: the one it had before, where that is remembered.
    #[must_use]
    pub fn lane(&self, sid: &str) -> Arc<Lane> {
        let mut lanes = self.shared.lanes.lock();
        if let Some(lane) = lanes.get(sid) {
            return Arc::clone(lane);
        }
        if lanes.len() >= REMEMBERED_LANES {
            // Those that nobody else holds have neither a session nor output left.
            lanes.retain(|_, lane| Arc::strong_count(lane) > 1);
        }
        let sid: Arc<str> = sid.into();
        let lane = Arc::new(Lane::new(Arc::clone(&sid)));
        lanes.insert(sid, Arc::clone(&lane));
        lane
    }

    /// The part of this output that belongs to one turn.
    #[must_use]
    pub fn port(&self, lane: Arc<Lane>, turn: TurnNumber) -> Port {
        Port {
            output: self.clone(),
            lane,
            turn,
        }
    }

    /// Whether so much output is unread that no more input may be taken: SPEC §2.
    #[must_use]
    pub fn is_full(&self) -> bool {
        self.shared.is_full()
    }

    /// Waits until output is no longer full, at most for `patience`.
    pub fn wait_for_room(&self, patience: Duration) {
        self.shared.wake();
        self.shared
            .wait(Instant::now() + patience, |shared| !shared.is_full());
    }

    /// Waits until everything queued is written, at most until `deadline`; answers whether it is.
    #[must_use]
    pub fn finish(&self, deadline: Instant) -> bool {
        let is_done = |shared: &Shared| shared.unread() == 0 || shared.is_closed();
        self.shared.wake();
        self.shared.wait(deadline, is_done);
        is_done(&self.shared)
    }
}

impl Shared {
    fn wake(&self) {
        if !self.work.swap(true, Ordering::AcqRel)
            && let Some(writer) = self.writer.get()
        {
            writer.unpark();
        }
    }

    fn unread(&self) -> usize {
        self.unread.load(Ordering::SeqCst)
    }

    fn is_full(&self) -> bool {
        self.unread() >= limits::UNREAD_OUTPUT_BYTES && !self.is_closed()
    }

    /// Whether so much is unread that turns may add no more; answers still may.
    fn is_crowded(&self) -> bool {
        self.unread() >= limits::TURN_OUTPUT_BYTES && !self.is_closed()
    }

    fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    /// Counts `bytes` that were queued.
    fn add(&self, bytes: usize) {
        self.unread.fetch_add(bytes, Ordering::SeqCst);
    }

    /// Takes `bytes` off the count of what is unread, and tells those who wait for it.
    fn take_off(&self, bytes: usize) {
        self.unread.fetch_sub(bytes, Ordering::SeqCst);
        self.tell_waiting();
    }

    fn tell_waiting(&self) {
        // Whoever waits says so before it looks at the count, so one of the two sees the other.
        if self.waiting.load(Ordering::SeqCst) > 0 {
            drop(self.room.lock());
            self.room_made.notify_all();
        }
    }

    /// Waits until `is_over`, at most until `deadline`.
    fn wait(&self, deadline: Instant, is_over: impl Fn(&Self) -> bool) {
        self.waiting.fetch_add(1, Ordering::SeqCst);
        let mut room = self.room.lock();
        while !is_over(self) {
            if self.room_made.wait_until(&mut room, deadline).timed_out() {
                break;
            }
        }
        drop(room);
        self.waiting.fetch_sub(1, Ordering::SeqCst);
    }
}

/// What one turn may send, in order, until its terminal frame.
#[derive(Clone)]
pub struct Port {
    output: Output,
    lane: Arc<Lane>,
    turn: TurnNumber,
}

impl Port {
    /// Begins the stream of the turn: from now on its frames are taken.
    pub fn open(&self) {
        self.lane.open(self.turn);
    }

    /// Appends a frame of the turn. Waits while the session's output is full, unless `hurry`.
    ///
    /// # Errors
    /// The turn has its terminal frame already.
    pub fn frame(&self, frame: &Frame<'_>, hurry: impl Fn() -> bool) -> Result<(), TurnClosed> {
        self.lane
            .wait_for_room(self.turn, &self.output.shared, &hurry)?;
        self.lane.append(self.turn, &self.output.shared, frame)
    }

    /// Appends an event of the turn, with its `seq`. Waits like [`Self::frame`].
    ///
    /// # Errors
    /// The turn has its terminal frame already.
    pub fn event(
        &self,
        event: turnhost_protocol::rpc::Event<'_>,
        hurry: impl Fn() -> bool,
    ) -> Result<(), TurnClosed> {
        self.lane
            .wait_for_room(self.turn, &self.output.shared, &hurry)?;
        self.lane
            .append_event(self.turn, &self.output.shared, event)
    }

    /// Appends streamed text. When the parent is slow it is joined to what waits; when it is very
    /// slow this waits, unless `hurry`.
    ///
    /// # Errors
    /// The turn has its terminal frame already.
    pub fn delta(
        &self,
        kind: Delta,
        text: &str,
        hurry: impl Fn() -> bool,
    ) -> Result<(), TurnClosed> {
        self.lane
            .wait_for_room(self.turn, &self.output.shared, &hurry)?;
        self.lane
            .append_delta(self.turn, &self.output.shared, kind, text)
    }

    /// Appends an activity frame, unless the one before it still waits.
    pub fn activity(&self, frame: &Frame<'_>) {
        self.lane
            .append_activity(self.turn, &self.output.shared, frame);
    }

    /// Appends the last `events` and the terminal frame, and takes nothing of this turn any more.
    /// Never waits.
    pub fn close(&self, events: Vec<turnhost_protocol::rpc::Event<'_>>, terminal: &Frame<'_>) {
        self.lane.close(&self.output.shared, events, terminal);
    }

    /// Wakes the turn if it waits for room, so that it sees why it should `hurry`.
    pub fn wake(&self) {
        self.lane.wake();
        self.output.shared.tell_waiting();
    }
}
