//! Frames that an answer is owed for, and questions to the person that are open.
//!
//! Pure bookkeeping; both tables are bounded by their owner. Invariant: an entry leaves the table
//! once, with its answer, so that each frame gets exactly one.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque};
use std::hash::{BuildHasher, RandomState};

use serde_json::value::RawValue;
use turnhost_protocol::frame::RequestId;
use turnhost_protocol::limits::{MAX_OPEN_REQUESTS, SETTLED_FRAMES};

/// What kind of answer a frame is owed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Kind {
    /// `turn.start`: one terminal frame.
    Turn,
    /// `interrupt`.
    Interrupt,
    /// `respond` and `clarify.lock`.
    Respond,
    /// `requests.open`.
    RequestsOpen,
    /// `control` and `reload_mcp`.
    Control,
    /// `session.list`.
    SessionList,
    /// `session.resume`.
    SessionResume,
    /// `session.close`.
    SessionClose,
    /// `idle.probe`.
    IdleProbe,
    /// `shutdown`.
    Shutdown,
    /// A type of a later protocol, or none: an `error`.
    Other,
}

/// The kinds that our own host refuses by an `error`.
const ANSWERED_BY_ERROR: [Kind; 8] = [
    Kind::Interrupt,
    Kind::RequestsOpen,
    Kind::SessionList,
    Kind::SessionResume,
    Kind::SessionClose,
    Kind::IdleProbe,
    Kind::Shutdown,
    Kind::Other,
];

impl Kind {
    /// What a frame of the type `name` is owed, if anything.
    #[must_use]
    pub fn of_input(name: &str) -> Option<Self> {
        Some(match name {
            "turn.start" => Self::Turn,
            "interrupt" => Self::Interrupt,
            "respond" | "clarify.lock" => Self::Respond,
            "requests.open" => Self::RequestsOpen,
            "control" | "reload_mcp" => Self::Control,
            "session.list" => Self::SessionList,
            "session.resume" => Self::SessionResume,
            "session.close" => Self::SessionClose,
            "idle.probe" => Self::IdleProbe,
            "shutdown" => Self::Shutdown,
            "hello.ack" => return None,
            _ => Self::Other,
        })
    }

    /// Whether a frame of the type `name` is the answer to one with its `request_id`.
    #[must_use]
    pub fn is_answer(name: &str) -> bool {
        name == "error" || Self::of_answer(name).is_some()
    }

    /// What a host's frame of the type `name` answers; an `error` answers any.
    pub(super) fn of_answer(name: &str) -> Option<Self> {
        Some(match name {
            "turn.end" | "turn.error" => Self::Turn,
            "interrupt.ack" => Self::Interrupt,
            "respond.ack" | "respond.error" => Self::Respond,
            "requests.open.ack" => Self::RequestsOpen,
            "control.ack" | "control.error" | "reload_mcp.ack" => Self::Control,
            "session.list.ack" => Self::SessionList,
            "session.resume.ack" => Self::SessionResume,
            "session.close.ack" => Self::SessionClose,
            "idle.verdict" => Self::IdleProbe,
            "shutdown.ack" => Self::Shutdown,
            _ => return None,
        })
    }
}

/// The open question that a `respond` is about.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Answered {
    /// The question's id.
    pub(super) request: String,
    /// One question of a batch only.
    pub(super) is_lock: bool,
}

/// A frame that is owed an answer.
#[derive(Debug, Clone)]
pub(super) struct Owed {
    pub(super) kind: Kind,
    /// `None` where the frame has none: whoever answers makes one.
    pub(super) id: Option<RequestId>,
    pub(super) sid: Option<String>,
    /// Where the frame begins in the bytes for the present host; `None` while it is kept.
    pub(super) offset: Option<u64>,
    /// For a `respond`.
    pub(super) answered: Option<Answered>,
}

/// Ids and names of the frames that are owed an answer, together, in bytes. One id may have a
/// megabyte.
pub(super) const MAX_PENDING_BYTES: usize = 64 * 1024 * 1024;

/// Longest id, session and method of a question that is remembered, in bytes: a hundred times
/// what our own host writes.
pub(super) const MAX_QUESTION_BYTES: usize = 2 * 1024;

impl Owed {
    /// What it holds beside itself; an id is held twice.
    pub(super) fn bytes(&self) -> usize {
        let id = self.id.as_ref().map_or(0, |id| id.as_json().len());
        let sid = self.sid.as_ref().map_or(0, String::len);
        let request = self.answered.as_ref().map_or(0, |it| it.request.len());
        2 * id + sid + request
    }
}

/// What an answer was for.
#[derive(Debug)]
pub(super) enum Settled {
    /// A frame that waited for it.
    Owed(Owed),
    /// A frame that was answered before.
    Repeated,
    /// Nothing that is known here.
    Unknown,
}

/// Names an entry for as long as it is in the table.
pub(super) type Serial = u64;

/// The frames that are owed an answer, in the order in which they came.
#[derive(Debug, Default)]
pub(super) struct Pending {
    entries: BTreeMap<Serial, Owed>,
    /// Entries by the key of their id; equal ids are possible, oldest first.
    by_id: HashMap<Box<str>, Serials>,
    /// Entries without an id, by what an answer shows of them.
    nameless: HashMap<(Kind, Box<str>), BTreeSet<Serial>>,
    next: Serial,
    turns: usize,
    bytes: usize,
    /// Hashes of kind and key: a wrong hit is as likely as a wrong bit in memory.
    settled: HashSet<u64>,
    settled_order: VecDeque<u64>,
    hasher: RandomState,
}

/// The entries of one id: nearly always one, which then costs no memory of its own.
#[derive(Debug)]
enum Serials {
    One(Serial),
    More(BTreeSet<Serial>),
}

impl Serials {
    /// The oldest that fits.
    fn find(&self, mut fits: impl FnMut(Serial) -> bool) -> Option<Serial> {
        match self {
            Self::One(only) => Some(*only).filter(|only| fits(*only)),
            Self::More(more) => more.iter().copied().find(|serial| fits(*serial)),
        }
    }

    fn add(&mut self, serial: Serial) {
        match self {
            Self::One(first) => *self = Self::More(BTreeSet::from([*first, serial])),
            Self::More(more) => {
                more.insert(serial);
            }
        }
    }

    /// Takes one out; answers whether none is left.
    fn remove(&mut self, serial: Serial) -> bool {
        match self {
            Self::One(only) => *only == serial,
            Self::More(more) => {
                more.remove(&serial);
                more.is_empty()
            }
        }
    }
}

impl Pending {
    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    pub(super) fn turns(&self) -> usize {
        self.turns
    }

    /// What the entries hold: [`Owed::bytes`].
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    pub(super) fn add(&mut self, owed: Owed) -> Serial {
        let serial = self.next;
        self.next += 1;
        self.turns += usize::from(owed.kind == Kind::Turn);
        self.bytes += owed.bytes();
        match &owed.id {
            Some(id) => {
                let key = key(id);
                // An id that is used again is a new frame.
                if !self.settled.is_empty() {
                    let hash = self.hash(owed.kind, &key);
                    self.settled.remove(&hash);
                }
                self.index(&key, serial);
            }
            None => {
                self.nameless
                    .entry(nameless_key(&owed))
                    .or_default()
                    .insert(serial);
            }
        }
        self.entries.insert(serial, owed);
        serial
    }

    fn index(&mut self, key: &str, serial: Serial) {
        match self.by_id.get_mut(key) {
            Some(serials) => serials.add(serial),
            None => {
                self.by_id.insert(key.into(), Serials::One(serial));
            }
        }
    }

    fn hash(&self, kind: Kind, key: &str) -> u64 {
        self.hasher.hash_one((kind, key))
    }

    /// The entry `serial`, to set where its frame begins.
    pub(super) fn get_mut(&mut self, serial: Serial) -> Option<&mut Owed> {
        self.entries.get_mut(&serial)
    }

    pub(super) fn remove(&mut self, serial: Serial) -> Option<Owed> {
        let owed = self.entries.remove(&serial)?;
        self.turns -= usize::from(owed.kind == Kind::Turn);
        self.bytes -= owed.bytes();
        match &owed.id {
            Some(id) => {
                let key = key(id);
                let serials = self.by_id.get_mut(&*key);
                if serials.is_some_and(|serials| serials.remove(serial)) {
                    self.by_id.remove(&*key);
                }
                self.remember(owed.kind, &key);
            }
            None => self.forget_nameless(&owed, serial),
        }
        Some(owed)
    }

    fn remember(&mut self, kind: Kind, key: &str) {
        let hash = self.hash(kind, key);
        if self.settled.insert(hash) {
            self.settled_order.push_back(hash);
        }
        if self.settled_order.len() > SETTLED_FRAMES
            && let Some(oldest) = self.settled_order.pop_front()
        {
            self.settled.remove(&oldest);
        }
    }

    /// Takes the entry that an answer of `kind` with this `id` and `sid` is for: the one with the
    /// same id, of the same session where several have it; else the oldest without an id.
    pub(super) fn settle(
        &mut self,
        kind: Kind,
        id: Option<&RequestId>,
        sid: Option<&str>,
    ) -> Settled {
        let mut serial = self.named(id, sid, |owed| owed.kind == kind);
        if serial.is_none() {
            let is_settled = |id| self.settled.contains(&self.hash(kind, &key(id)));
            if id.is_some_and(is_settled) {
                return Settled::Repeated;
            }
            // A host may understand what looked broken here.
            serial = self
                .named(id, sid, |owed| owed.kind == Kind::Other)
                .or_else(|| self.oldest_nameless(kind, sid));
        }
        if let Some(owed) = serial.and_then(|serial| self.remove(serial)) {
            if let (None, Some(id)) = (&owed.id, id) {
                self.remember(kind, &key(id));
            }
            return Settled::Owed(owed);
        }
        Settled::Unknown
    }

    /// Takes the entry that an `error` frame is for: any kind, a turn last, since our own host
    /// answers turns differently. One under an id that nobody here knows, made by the host, is
    /// for a frame without one.
    pub(super) fn settle_by_error(
        &mut self,
        id: Option<&RequestId>,
        sid: Option<&str>,
    ) -> Option<Owed> {
        let of_made_id = || {
            let is_settled =
                |kind| id.is_some_and(|id| self.settled.contains(&self.hash(kind, &key(id))));
            if id.is_none() || ANSWERED_BY_ERROR.into_iter().any(is_settled) {
                return None;
            }
            let oldest = |kind| self.oldest_nameless(kind, sid);
            ANSWERED_BY_ERROR.into_iter().filter_map(oldest).min()
        };
        let serial = self
            .named(id, sid, |owed| owed.kind != Kind::Turn)
            .or_else(|| self.named(id, sid, |_| true))
            .or_else(of_made_id)?;
        let owed = self.remove(serial)?;
        if let (None, Some(id)) = (&owed.id, id) {
            self.remember(owed.kind, &key(id));
        }
        Some(owed)
    }

    /// Gives the oldest turn of `sid` without an id the one that its host made for it.
    pub(super) fn adopt(&mut self, id: RequestId, sid: Option<&str>) {
        if self.named(Some(&id), sid, |_| true).is_some() {
            return;
        }
        if let Some(serial) = self.oldest_nameless(Kind::Turn, sid)
            && let Some(mut owed) = self.entries.remove(&serial)
        {
            self.forget_nameless(&owed, serial);
            self.index(&key(&id), serial);
            self.bytes -= owed.bytes();
            owed.id = Some(id);
            self.bytes += owed.bytes();
            self.entries.insert(serial, owed);
        }
    }

    /// Takes all entries whose frames went to the host, or all, in order.
    pub(super) fn take(&mut self, also_kept: bool) -> Vec<Owed> {
        let serials: Vec<Serial> = self
            .entries
            .iter()
            .filter(|(_, owed)| also_kept || owed.offset.is_some())
            .map(|(serial, _)| *serial)
            .collect();
        serials
            .into_iter()
            .filter_map(|serial| self.remove(serial))
            .collect()
    }

    fn named(
        &self,
        id: Option<&RequestId>,
        sid: Option<&str>,
        fits: impl Fn(&Owed) -> bool,
    ) -> Option<Serial> {
        let serials = self.by_id.get(&*key(id?))?;
        let fitting = |serial| self.entries.get(&serial).filter(|owed| fits(owed));
        let of_session =
            |owed: &Owed| owed.sid.as_deref().unwrap_or_default() == sid.unwrap_or_default();
        serials
            .find(|serial| fitting(serial).is_some_and(of_session))
            .or_else(|| serials.find(|serial| fitting(serial).is_some()))
    }

    fn oldest_nameless(&self, kind: Kind, sid: Option<&str>) -> Option<Serial> {
        if self.nameless.is_empty() {
            return None;
        }
        let key = (kind, sid.unwrap_or_default().into());
        self.nameless.get(&key)?.first().copied()
    }

    fn forget_nameless(&mut self, owed: &Owed, serial: Serial) {
        let key = nameless_key(owed);
        if let Some(serials) = self.nameless.get_mut(&key) {
            serials.remove(&serial);
            if serials.is_empty() {
                self.nameless.remove(&key);
            }
        }
    }
}

fn nameless_key(owed: &Owed) -> (Kind, Box<str>) {
    (owed.kind, owed.sid.as_deref().unwrap_or_default().into())
}

/// What tells two ids apart, however a host writes them: JSON without escapes and white space.
fn key(id: &RequestId) -> Cow<'_, str> {
    let raw = id.as_json();
    let plain = raw.starts_with('"') && !raw.contains('\\');
    if plain || raw.bytes().all(|byte| byte.is_ascii_digit()) {
        return Cow::Borrowed(raw);
    }
    let mut repaired = raw.as_bytes().to_vec();
    turnhost_protocol::json::replace_lone_surrogates(&mut repaired);
    match serde_json::from_slice::<serde_json::Value>(&repaired) {
        Ok(value) => Cow::Owned(value.to_string()),
        Err(_) => Cow::Borrowed(raw),
    }
}

/// A question to the person.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Question {
    pub(super) id: String,
    pub(super) sid: String,
    pub(super) method: String,
}

/// The questions of the present host that are open, oldest first.
#[derive(Debug, Default)]
pub(super) struct Questions {
    open: BTreeMap<Serial, Question>,
    by_id: HashMap<String, Serial>,
    next: Serial,
}

impl Questions {
    pub(super) fn len(&self) -> usize {
        self.open.len()
    }

    pub(super) fn ask(&mut self, question: Question) {
        self.close(&question.id.clone());
        if self.open.len() >= MAX_OPEN_REQUESTS
            && let Some((_, oldest)) = self.open.pop_first()
        {
            self.by_id.remove(&oldest.id);
        }
        self.by_id.insert(question.id.clone(), self.next);
        self.open.insert(self.next, question);
        self.next += 1;
    }

    pub(super) fn close(&mut self, id: &str) {
        if let Some(serial) = self.by_id.remove(id) {
            self.open.remove(&serial);
        }
    }

    pub(super) fn take(&mut self) -> impl Iterator<Item = Question> + use<> {
        self.by_id.clear();
        std::mem::take(&mut self.open).into_values()
    }
}

/// The id of an answer, as the answer's bytes show it.
pub(super) fn request_id(raw: Option<&RawValue>) -> Option<RequestId> {
    raw.map(RequestId::new)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(raw: &str) -> RequestId {
        RequestId::new(serde_json::from_str(raw).unwrap())
    }

    fn owed(kind: Kind, raw: Option<&str>, sid: &str) -> Owed {
        Owed {
            kind,
            id: raw.map(id),
            sid: Some(sid.to_owned()),
            offset: Some(0),
            answered: None,
        }
    }

    #[test]
    fn ids_are_told_apart_by_what_they_mean() {
        let mut pending = Pending::default();
        for (sent, given_back) in [
            (r#""a""#, r#""a""#),
            (r#""\u0061b""#, r#""ab""#),
            (r#""\ud800""#, r#""\ufffd""#),
            (r#"{"a": 1}"#, r#"{"a":1}"#),
            ("17", "17"),
            ("1.50", "1.5"),
            ("[null]", "[ null ]"),
        ] {
            pending.add(owed(Kind::Control, Some(sent), "s"));
            let settled = pending.settle(Kind::Control, Some(&id(given_back)), Some("s"));
            assert!(matches!(settled, Settled::Owed(_)), "{sent}");
        }
        pending.add(owed(Kind::Control, Some("17"), "s"));
        let text = pending.settle(Kind::Control, Some(&id(r#""17""#)), Some("s"));
        assert!(matches!(text, Settled::Unknown));
    }

    #[test]
    fn equal_ids_are_told_apart_by_kind_and_session() {
        let mut pending = Pending::default();
        let first = pending.add(owed(Kind::Turn, Some("1"), "a"));
        pending.add(owed(Kind::Turn, Some("1"), "b"));
        pending.add(owed(Kind::Control, Some("1"), "b"));
        let sid_of = |settled| match settled {
            Settled::Owed(owed) => owed.sid,
            other => panic!("{other:?}"),
        };
        let settled = pending.settle(Kind::Turn, Some(&id("1")), Some("b"));
        assert_eq!(sid_of(settled).as_deref(), Some("b"));
        let by_error = pending.settle_by_error(Some(&id("1")), Some("a"));
        assert_eq!(by_error.map(|owed| owed.kind), Some(Kind::Control));
        assert_eq!((pending.len(), pending.turns()), (1, 1));
        assert!(pending.remove(first).is_some());
    }

    #[test]
    fn a_second_answer_is_known_as_one() {
        let mut pending = Pending::default();
        pending.add(owed(Kind::Turn, Some("1"), "a"));
        let mut settle = || pending.settle(Kind::Turn, Some(&id("1")), Some("a"));
        assert!(matches!(settle(), Settled::Owed(_)));
        assert!(matches!(settle(), Settled::Repeated));
        pending.add(owed(Kind::Turn, Some("1"), "a"));
        let again = pending.settle(Kind::Turn, Some(&id("1")), Some("a"));
        assert!(matches!(again, Settled::Owed(_)));
        let other = pending.settle(Kind::Turn, Some(&id("2")), Some("a"));
        assert!(matches!(other, Settled::Unknown));
    }

    #[test]
    fn a_turn_without_an_id_takes_the_one_of_its_host() {
        let mut pending = Pending::default();
        pending.add(owed(Kind::Turn, None, "a"));
        pending.add(owed(Kind::Turn, None, "b"));
        pending.adopt(id(r#""made""#), Some("b"));
        let settled = pending.settle(Kind::Turn, Some(&id(r#""made""#)), Some("b"));
        assert!(matches!(settled, Settled::Owed(owed) if owed.sid.as_deref() == Some("b")));
        let settled = pending.settle(Kind::Turn, Some(&id(r#""other""#)), Some("a"));
        assert!(matches!(settled, Settled::Owed(_)));
        assert_eq!((pending.len(), pending.turns()), (0, 0));
    }

    #[test]
    fn what_is_remembered_is_bounded() {
        let mut pending = Pending::default();
        for number in 0..3 * SETTLED_FRAMES {
            pending.add(owed(Kind::Turn, Some(&number.to_string()), "a"));
            pending.settle(Kind::Turn, Some(&id(&number.to_string())), Some("a"));
        }
        assert_eq!(pending.settled.len(), SETTLED_FRAMES);
        let mut questions = Questions::default();
        for number in 0..=MAX_OPEN_REQUESTS {
            questions.ask(Question {
                id: number.to_string(),
                sid: String::new(),
                method: String::new(),
            });
        }
        questions.close("1");
        assert_eq!(questions.len(), MAX_OPEN_REQUESTS - 1);
        assert_eq!(questions.take().next().unwrap().id, "2");
    }
}
