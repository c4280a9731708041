//! Which sessions are live, and the turn that each has.

use std::borrow::Cow;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use parking_lot::{Condvar, Mutex};
use turnhost_protocol::frame::RequestId;
use turnhost_protocol::frame::input::TurnStart;
use turnhost_protocol::frame::output::{
    ExecutionState, Output as Frame, Reason, SessionLine, TurnEnd, TurnError,
};
use turnhost_protocol::limits::{CAPACITY_CODE, CAPACITY_RETRY_MS};
use turnhost_protocol::process::monotonic_ns;
use turnhost_protocol::rpc::Event;

use super::{Conversation, Exchange, Setup, Turn};
use crate::cancel::Cancel;
use crate::output::{Lane, Output, TurnNumber};

/// The sessions of a host. Clones lead to the same table.
#[derive(Clone)]
pub struct Sessions {
    shared: Arc<Shared>,
}

struct Shared {
    output: Output,
    /// What conversations begin with.
    setup: Setup,
    state: Mutex<State>,
    /// A turn got its terminal frame.
    settled: Condvar,
    live_sessions: AtomicUsize,
    finished_turns: AtomicU64,
}

#[derive(Default)]
struct State {
    sessions: HashMap<Arc<str>, Session>,
    /// By `session_key`. Those that no session shows stay known.
    conversations: HashMap<Arc<str>, Known>,
    /// Ids of live turns.
    request_ids: HashSet<RequestId>,
    live_turns: usize,
    next_turn: u64,
    draining: bool,
}

struct Known {
    conversation: Arc<Conversation>,
    shown_by: Option<Arc<str>>,
    /// When a turn of it last began or ended, in seconds since 1970.
    last_active: f64,
}

struct Session {
    lane: Arc<Lane>,
    conversation: Arc<Conversation>,
    live: Option<Arc<Turn>>,
    generation: Option<i64>,
    /// Answers that are owed once the live turn has ended.
    closing: Vec<RequestId>,
}

/// What else keeps turns out.
#[derive(Debug, Clone, Copy)]
pub struct AtTheDoor {
    /// As many turns wait as may.
    pub is_full: bool,
    /// The end of the process has begun.
    pub is_draining: bool,
}

/// Why a turn is not admitted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// The frame names no session.
    #[error("sid required")]
    NoSid,
    /// The session, or another one with its key, has a turn.
    #[error("session busy")]
    Busy,
    /// Another live turn has the same id.
    #[error("request_id belongs to a live turn; give each turn its own")]
    RequestIdLive,
    /// Too many turns wait.
    #[error("too many turns wait for a worker; try again later")]
    Capacity,
    /// The host ends.
    #[error("the host is draining and takes no new turns")]
    Draining,
}

impl Refusal {
    /// The terminal frame that says so.
    #[must_use]
    pub fn frame<'a>(self, sid: &'a str, request_id: &'a RequestId) -> Frame<'a> {
        let (reason, full) = match self {
            Self::NoSid | Self::RequestIdLive => (Reason::Invalid, false),
            Self::Busy => (Reason::Busy, false),
            Self::Capacity => (Reason::Capacity, true),
            Self::Draining => (Reason::Draining, false),
        };
        Frame::TurnError(TurnError {
            sid,
            request_id,
            message: self.to_string().into(),
            reason,
            execution_state: ExecutionState::NotStarted,
            code: full.then_some(CAPACITY_CODE),
            retry_after_ms: full.then_some(CAPACITY_RETRY_MS),
        })
    }
}

/// How a turn ends.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Terminal {
    /// With `turn.end`.
    End {
        /// Whether an interrupt ended it, or kept it from running.
        interrupted: bool,
    },
    /// With `turn.error`. Whether parts of it ran is known from the turn.
    Error {
        /// Why.
        reason: Reason,
        /// The same for a person.
        message: String,
    },
}

/// What `session.close` found.
pub enum Closing {
    /// No such session.
    Unknown,
    /// It had no turn; the answer is given.
    Closed,
    /// Its turn is asked to end; the answer follows the terminal frame.
    Waiting(Arc<Turn>),
}

impl Sessions {
    /// An empty table whose frames go to `output`; conversations begin with `setup`.
    #[must_use]
    pub fn new(output: Output, setup: Setup) -> Self {
        Self {
            shared: Arc::new(Shared {
                output,
                setup,
                state: Mutex::default(),
                settled: Condvar::new(),
                live_sessions: AtomicUsize::new(0),
                finished_turns: AtomicU64::new(0),
            }),
        }
    }

    /// Claims the session of `start` for a turn: SPEC §5.1. `accept` is called with the lane while nobody else can see the turn.
    ///
    /// # Errors
    /// Why there is no turn; nothing was changed.
    pub fn admit(
        &self,
        start: &TurnStart,
        request_id: &RequestId,
        at_the_door: AtTheDoor,
        accept: impl FnOnce(&Arc<Lane>),
    ) -> Result<Arc<Turn>, Refusal> {
        if start.sid.is_empty() {
            return Err(Refusal::NoSid);
        }
        let mut state = self.shared.state.lock();
        let state = &mut *state;
        let session = state.sessions.get(start.sid.as_str());
        if session.is_some_and(|session| session.live.is_some()) {
            return Err(Refusal::Busy);
        }
        if state.request_ids.contains(request_id) {
            return Err(Refusal::RequestIdLive);
        }
        // Without a key a live session goes on with the one it has.
        let key: Arc<str> = match (&start.session_key, session) {
            (Some(key), _) => key.as_str().into(),
            (None, Some(session)) => Arc::clone(session.conversation.key()),
            (None, None) => start.sid.as_str().into(),
        };
        let holder = state
            .conversations
            .get(&key)
            .and_then(|known| known.shown_by.clone());
        let other = holder.filter(|holder| **holder != *start.sid);
        if let Some(other) = &other
            && state
                .sessions
                .get(other)
                .is_some_and(|session| session.live.is_some())
        {
            return Err(Refusal::Busy);
        }
        if at_the_door.is_full {
            return Err(Refusal::Capacity);
        }
        if state.draining || at_the_door.is_draining {
            return Err(Refusal::Draining);
        }

        // From here on the turn is admitted.
        if let Some(other) = other {
            state.move_session(&other, &start.sid, &self.shared.output);
        }
        let session = state.bind(&start.sid, &key, &self.shared);
        session.generation = session.generation.max(start.queued_prompt_generation);
        let lane = Arc::clone(&session.lane);
        let conversation = Arc::clone(&session.conversation);
        state.next_turn += 1;
        let number = TurnNumber(state.next_turn);
        let turn = Arc::new(Turn {
            number,
            sid: Arc::clone(lane.sid()),
            request_id: request_id.clone(),
            turn_id: start.turn_id.clone(),
            generation: start.queued_prompt_generation,
            cancel: Cancel::default(),
            port: self.shared.output.port(Arc::clone(&lane), number),
            conversation,
            started: AtomicBool::new(false),
            progress_ns: AtomicU64::new(0),
        });
        if let Some(session) = state.sessions.get_mut(start.sid.as_str()) {
            session.live = Some(Arc::clone(&turn));
        }
        state.request_ids.insert(request_id.clone());
        state.live_turns += 1;
        self.shared
            .live_sessions
            .store(state.sessions.len(), Ordering::Relaxed);
        turn.port.open();
        accept(&lane);
        Ok(turn)
    }

    /// Whether `turn` may still begin: nobody asked it to end, no higher generation came, and it
    /// has no terminal frame.
    #[must_use]
    pub fn may_begin(&self, turn: &Turn) -> bool {
        self.shared.state.lock().may_begin(turn)
    }

    /// Begins `turn`, if it still may; answers whether it did. From then on parts of it ran.
    #[must_use]
    pub fn begin(&self, turn: &Turn) -> bool {
        let state = self.shared.state.lock();
        let may_begin = state.may_begin(turn);
        if may_begin {
            turn.started.store(true, Ordering::Release);
        }
        may_begin
    }

    /// Adds what `turn` said to its conversation, unless it was given up; answers whether it did.
    #[must_use]
    pub fn keep(&self, turn: &Turn, exchange: Exchange) -> bool {
        let state = self.shared.state.lock();
        let is_live = state.is_live(turn);
        if is_live {
            turn.conversation.add(exchange);
        }
        is_live
    }

    /// Asks the turn of `sid` to end. `answer` is called with whether the session is known, before
    /// the turn can react; the turn is returned for whoever has to wake it.
    pub fn interrupt(
        &self,
        sid: &str,
        generation: Option<i64>,
        answer: impl FnOnce(bool),
    ) -> Option<Arc<Turn>> {
        let mut state = self.shared.state.lock();
        let Some(session) = state.sessions.get_mut(sid) else {
            answer(false);
            return None;
        };
        session.generation = session.generation.max(generation);
        answer(true);
        let turn = session.live.clone();
        drop(state);
        if let Some(turn) = &turn {
            turn.cancel.set();
        }
        turn
    }

    /// Ends a turn: its terminal frame goes out and its session is free. Answers whether it had
    /// not ended before.
    pub fn settle(&self, turn: &Turn, terminal: Terminal) -> bool {
        let info = turn.conversation.info(false);
        let (history_version, message_count) = turn.conversation.version_and_count();
        let mut state = self.shared.state.lock();
        let Some(session) = state.sessions.get_mut(&turn.sid) else {
            return false;
        };
        if session
            .live
            .as_ref()
            .is_none_or(|live| live.number != turn.number)
        {
            return false;
        }
        session.live = None;
        let closing = std::mem::take(&mut session.closing);
        let (sid, request_id) = (&*turn.sid, &turn.request_id);
        let started = turn.is_started();
        let (event, frame) = match terminal {
            Terminal::End { interrupted } => (
                Some(Event::SessionInfo(Box::new(Cow::Borrowed(&info)))),
                Frame::TurnEnd(TurnEnd {
                    sid,
                    request_id,
                    session_key: turn.conversation.key(),
                    history_version,
                    message_count,
                    interrupted,
                    ended_ns: monotonic_ns(),
                    session_info: Some(&info),
                    session_info_emitted: true,
                    usage: &info.usage,
                    truncated: false,
                }),
            ),
            Terminal::Error { reason, message } => {
                let execution_state = if started {
                    ExecutionState::Unknown
                } else {
                    ExecutionState::NotStarted
                };
                let event = Event::Error {
                    message: message.clone().into(),
                    reason: Some(reason.name()),
                };
                (
                    started.then_some(event),
                    Frame::TurnError(TurnError {
                        sid,
                        request_id,
                        message: message.into(),
                        reason,
                        execution_state,
                        code: None,
                        retry_after_ms: None,
                    }),
                )
            }
        };
        turn.port.close(event.into_iter().collect(), &frame);
        state.request_ids.remove(request_id);
        state.live_turns -= 1;
        if let Some(known) = state.conversations.get_mut(turn.conversation.key()) {
            known.last_active = seconds_since_1970();
        }
        self.shared.finished_turns.fetch_add(1, Ordering::Relaxed);
        if !closing.is_empty() {
            self.close_now(&mut state, sid, &closing);
        }
        drop(state);
        self.shared.settled.notify_all();
        self.shared.output.flush();
        true
    }

    /// Ends the session `sid`, after its turn if it has one: SPEC §3.
    pub fn close(&self, sid: &str, request_id: &RequestId) -> Closing {
        let mut state = self.shared.state.lock();
        let Some(session) = state.sessions.get_mut(sid) else {
            return Closing::Unknown;
        };
        let Some(turn) = session.live.clone() else {
            self.close_now(&mut state, sid, std::slice::from_ref(request_id));
            return Closing::Closed;
        };
        session.closing.push(request_id.clone());
        drop(state);
        turn.cancel.set();
        Closing::Waiting(turn)
    }

    fn close_now(&self, state: &mut State, sid: &str, request_ids: &[RequestId]) {
        let Some(session) = state.sessions.remove(sid) else {
            return;
        };
        state.conversations.remove(session.conversation.key());
        self.shared
            .live_sessions
            .store(state.sessions.len(), Ordering::Relaxed);
        finalize(sid, &session, "session_close");
        for request_id in request_ids {
            let ack = Frame::SessionCloseAck { sid, request_id };
            self.shared.output.session_reply(&session.lane, &ack);
        }
    }

    /// Admits no more turns.
    pub fn begin_drain(&self) {
        self.shared.state.lock().draining = true;
    }

    /// Waits until no turn is live, at most until `deadline`; answers those that still are.
    pub fn wait_until_settled(&self, deadline: Instant) -> Vec<Arc<Turn>> {
        let mut state = self.shared.state.lock();
        while state.live_turns > 0 {
            if self
                .shared
                .settled
                .wait_until(&mut state, deadline)
                .timed_out()
            {
                break;
            }
        }
        state.live_turns()
    }

    /// Finalizes every session but those of `still_live`, which stay recoverable: SPEC §8.
    pub fn finalize_all(&self, still_live: &[Arc<Turn>], end_reason: &str) {
        let state = self.shared.state.lock();
        let mut idle: Vec<_> = state
            .sessions
            .iter()
            .filter(|(sid, _)| !still_live.iter().any(|turn| turn.sid == **sid))
            .collect();
        idle.sort_unstable_by_key(|(sid, _)| Arc::clone(sid));
        for (sid, session) in idle {
            finalize(sid, session, end_reason);
        }
    }

    /// Whether `turn` has no terminal frame yet.
    #[must_use]
    pub fn is_live(&self, turn: &Turn) -> bool {
        self.shared.state.lock().is_live(turn)
    }

    /// The sessions that have a turn, sorted.
    #[must_use]
    pub fn busy_sids(&self) -> Vec<String> {
        let state = self.shared.state.lock();
        let mut sids: Vec<String> = state
            .live_turns()
            .iter()
            .map(|turn| turn.sid.to_string())
            .collect();
        sids.sort_unstable();
        sids
    }

    /// All conversations of this host, the last active first.
    #[must_use]
    pub fn list(&self) -> Vec<SessionLine> {
        let state = self.shared.state.lock();
        let mut lines: Vec<SessionLine> = state
            .conversations
            .values()
            .map(|known| {
                let session = known
                    .shown_by
                    .as_ref()
                    .and_then(|sid| state.sessions.get(sid));
                let live = session.and_then(|session| session.live.as_ref());
                SessionLine {
                    session_key: known.conversation.key().to_string(),
                    sid: known.shown_by.as_deref().map(str::to_owned),
                    state: match live {
                        Some(turn) if turn.is_started() => "running",
                        Some(_) => "queued",
                        None => "idle",
                    },
                    message_count: known.conversation.version_and_count().1,
                    last_active: known.last_active,
                }
            })
            .collect();
        lines.sort_by(|one, other| other.last_active.total_cmp(&one.last_active));
        lines
    }

    /// Sessions in memory. Takes no lock.
    #[must_use]
    pub fn live_count(&self) -> usize {
        self.shared.live_sessions.load(Ordering::Relaxed)
    }

    /// Turns that ended since the start. Takes no lock.
    #[must_use]
    pub fn finished_turns(&self) -> u64 {
        self.shared.finished_turns.load(Ordering::Relaxed)
    }
}

impl State {
    fn is_live(&self, turn: &Turn) -> bool {
        let session = self.sessions.get(&turn.sid);
        let live = session.and_then(|session| session.live.as_ref());
        live.is_some_and(|live| live.number == turn.number)
    }

    fn may_begin(&self, turn: &Turn) -> bool {
        let newest = self
            .sessions
            .get(&turn.sid)
            .and_then(|session| session.generation);
        let is_outdated = turn
            .generation
            .is_some_and(|own| newest.is_some_and(|newest| own < newest));
        self.is_live(turn) && !is_outdated && !turn.cancel.is_set()
    }

    fn live_turns(&self) -> Vec<Arc<Turn>> {
        self.sessions
            .values()
            .filter_map(|session| session.live.clone())
            .collect()
    }

    /// Gives the idle session `from` the new name `to`: a window that came back.
    fn move_session(&mut self, from: &str, to: &str, output: &Output) {
        let Some(moved) = self.sessions.remove(from) else {
            return;
        };
        let lane = output.lane(to);
        if let Some(known) = self.conversations.get_mut(moved.conversation.key()) {
            known.shown_by = Some(Arc::clone(lane.sid()));
        }
        if let Some(replaced) = self
            .sessions
            .insert(Arc::clone(lane.sid()), Session { lane, ..moved })
            && let Some(known) = self.conversations.get_mut(replaced.conversation.key())
        {
            known.shown_by = None;
        }
    }

    /// The session `sid`, showing the conversation `key`; either is made where it is missing.
    fn bind(&mut self, sid: &str, key: &Arc<str>, shared: &Shared) -> &mut Session {
        let known = self
            .conversations
            .entry(Arc::clone(key))
            .or_insert_with(|| Known {
                conversation: Arc::new(Conversation::new(Arc::clone(key), shared.setup.clone())),
                shown_by: None,
                last_active: 0.0,
            });
        known.last_active = seconds_since_1970();
        let conversation = Arc::clone(&known.conversation);
        let Self {
            sessions,
            conversations,
            ..
        } = self;
        let lane = shared.output.lane(sid);
        let session = sessions
            .entry(Arc::clone(lane.sid()))
            .or_insert_with(|| Session {
                lane,
                conversation: Arc::clone(&conversation),
                live: None,
                generation: None,
                closing: Vec::new(),
            });
        if session.conversation.key() != key
            && let Some(hidden) = conversations.get_mut(session.conversation.key())
        {
            hidden.shown_by = None;
        }
        session.conversation = conversation;
        if let Some(known) = conversations.get_mut(key) {
            known.shown_by = Some(Arc::clone(session.lane.sid()));
        }
        session
    }
}

fn finalize(sid: &str, session: &Session, end_reason: &str) {
    let session_key = &**session.conversation.key();
    tracing::info!(sid, session_key, %end_reason, "session finalized");
}

fn seconds_since_1970() -> f64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0.0, |since| since.as_secs_f64())
}
