//! Seeded histories of a gateway, hosts and time against the core, checked for its invariants.
//!
//! The seed of each history is printed when one fails; `TURNHOST_SIM_SEED` runs that one alone,
//! `TURNHOST_SIM_HISTORIES` changes how many are run.

use std::collections::{HashMap, HashSet, VecDeque};

use serde_json::{Value, json};
use turnhost_protocol::frame::output::ExecutionState;
use turnhost_protocol::limits;

use super::*;

/// A small generator of random numbers (splitmix64): the same histories on each machine.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }

    fn one_in(&mut self, bound: u64) -> bool {
        self.below(bound) == 0
    }

    fn pick<'a, T>(&mut self, list: &'a [T]) -> &'a T {
        &list[self.below(list.len() as u64) as usize]
    }
}

/// A frame that a host has in its hands.
#[derive(Clone)]
struct Work {
    kind: &'static str,
    id: Option<String>,
    sid: String,
}

struct Host {
    accepted: bool,
    running: bool,
    deaf: bool,
    /// Nothing ends it once it was killed; `stuck` from then on.
    unkillable: bool,
    stuck: bool,
    killed: bool,
    greeted: bool,
    dying: Option<Exit>,
    input_closed: bool,
    /// Lines with the offset at which each begins.
    sent: Vec<(u64, String)>,
    total: u64,
    inbox: VecDeque<Work>,
    answered: Vec<Work>,
    session: usize,
    hello_at: Option<Nanos>,
}

struct World {
    random: Random,
    core: Core,
    now: Nanos,
    host: Option<Host>,
    over: Option<EndCode>,
    gateway_closed: bool,
    next_id: u64,
    /// Answers that are owed, by kind and id; those without an id by kind and session.
    owed: HashMap<(&'static str, String), usize>,
    /// The bytes of each turn's frame were written, at least in part.
    begun: HashSet<String>,
    delivered: HashSet<String>,
    /// Ids that several frames have.
    shared: HashSet<String>,
    /// Starts of hosts that nobody asked for, since the budget was refilled.
    restarts: VecDeque<Nanos>,
    asked_restart: bool,
    had_spawn: bool,
    /// Questions of the present host that are open.
    questions: HashSet<String>,
    /// Whether each step is printed.
    shown: bool,
}

const TYPES: [&str; 11] = [
    "turn.start",
    "turn.start",
    "turn.start",
    "interrupt",
    "control",
    "respond",
    "requests.open",
    "session.list",
    "session.resume",
    "session.close",
    "idle.probe",
];

fn kind_name(kind: Kind) -> &'static str {
    match kind {
        Kind::Turn => "turn.start",
        Kind::Interrupt => "interrupt",
        Kind::Respond => "respond",
        Kind::RequestsOpen => "requests.open",
        Kind::Control => "control",
        Kind::SessionList => "session.list",
        Kind::SessionResume => "session.resume",
        Kind::SessionClose => "session.close",
        Kind::IdleProbe => "idle.probe",
        Kind::Shutdown => "shutdown",
        Kind::Other => "other",
    }
}

fn answer_of(kind: &str) -> &'static str {
    match kind {
        "turn.start" => "turn.end",
        "interrupt" => "interrupt.ack",
        "respond" => "respond.ack",
        "requests.open" => "requests.open.ack",
        "control" => "control.ack",
        "session.list" => "session.list.ack",
        "session.resume" => "session.resume.ack",
        "session.close" => "session.close.ack",
        "idle.probe" => "idle.verdict",
        "shutdown" => "shutdown.ack",
        _ => "error",
    }
}

impl World {
    fn new(seed: u64) -> Self {
        let mut random = Random(seed);
        let respawn = RespawnRules {
            max: random.below(5) as usize,
            ..RespawnRules::default()
        };
        let rules = Rules {
            // Small, so that ids which are too long for it are cheap.
            max_frame_bytes: limits::MIN_MAX_FRAME_BYTES,
            homes: vec![PathBuf::from("/home/a")],
            build_sha: String::new(),
            heartbeat: from_ms(15_000),
            respawn,
            hello_wait: from_ms(limits::HELLO_WAIT_MS),
        };
        Self {
            random,
            core: Core::new(rules),
            now: 1_000_000_000,
            host: None,
            over: None,
            gateway_closed: false,
            next_id: 0,
            owed: HashMap::new(),
            begun: HashSet::new(),
            delivered: HashSet::new(),
            shared: HashSet::new(),
            restarts: VecDeque::new(),
            asked_restart: false,
            had_spawn: false,
            questions: HashSet::new(),
            shown: false,
        }
    }

    fn run(&mut self) {
        let steps = 10 + self.random.below(150);
        for _ in 0..steps {
            if self.over.is_some() {
                break;
            }
            self.random_event();
        }
        self.finish();
        let open: Vec<_> = self.owed.iter().filter(|(_, count)| **count > 0).collect();
        assert!(open.is_empty(), "frames without an answer: {open:?}");
        let left = self.host.as_ref().filter(|host| !host.stuck);
        assert!(left.is_none(), "a host was left behind");
        assert!(self.questions.is_empty(), "a question stays open");
    }

    /// Asks for an end, and lets time pass until it is there.
    fn finish(&mut self) {
        if self.over.is_some() {
            return;
        }
        if self.random.one_in(2) {
            self.close_gateway();
        } else {
            self.step(Event::Terminate);
        }
        for _ in 0..10_000 {
            if self.over.is_some() {
                return;
            }
            if self
                .host
                .as_ref()
                .is_some_and(|host| host.running && host.dying.is_some())
            {
                self.exit();
                continue;
            }
            match self.core.deadline() {
                Some(at) => self.now = self.now.max(at),
                None => panic!("waits for nothing in {:?}", self.core.status()),
            }
            self.step(Event::Time(None));
        }
        panic!("does not end: {:?}", self.core.status());
    }

    fn random_event(&mut self) {
        match self.random.below(20) {
            0..=6 if !self.gateway_closed => self.gateway_line(),
            7..=15 => self.host_event(),
            16 if self.random.one_in(20) => self.step(Event::Terminate),
            17 if self.random.one_in(20) => self.close_gateway(),
            _ => self.pass_time(),
        }
    }

    fn close_gateway(&mut self) {
        self.gateway_closed = true;
        self.step(Event::GatewayClosed);
    }

    fn pass_time(&mut self) {
        let milliseconds = [1, 100, 1_000, 30_000, 400_000][self.random.below(5) as usize];
        let until = self.now + from_ms(1 + self.random.below(milliseconds));
        // As a driver does: never past a deadline without saying so.
        while let Some(at) = self.core.deadline()
            && at < until
        {
            self.now = self.now.max(at);
            if self
                .host
                .as_ref()
                .is_some_and(|host| host.running && host.killed)
            {
                self.exit();
                continue;
            }
            let look = HostLook {
                silent: !self.random.one_in(4),
                cpu_ticks: Some(self.random.below(2)),
            };
            self.step(Event::Time(Some(look)));
            if self.over.is_some() {
                return;
            }
        }
        self.now = until;
    }

    fn gateway_line(&mut self) {
        let odd = self.random.below(40);
        if odd == 0 {
            // Ignored while a host runs; else it counts for the next spawn.
            self.asked_restart |= self.host.as_ref().is_none_or(|host| !host.running);
            return self.step(Event::GatewayLine(b"{\"type\":\"host.restart\"}"));
        }
        if odd == 1 {
            return self.step(Event::GatewayLine(b"{\"type\":\"hello.ack\"}"));
        }
        self.next_id += 1;
        let number = self.next_id;
        if odd == 2 {
            return self.step(Event::GatewayLine(format!("junk {number}").as_bytes()));
        }
        match odd {
            5 => return self.broken_line(number),
            6 => return self.long_line(number),
            7 => {
                let id = format!("r{number}");
                let line = json!({"type": "shutdown", "n": number, "request_id": id,
                    "wait_ms": "soon"});
                *self.owed.entry(("other", id)).or_default() += 1;
                return self.step(Event::GatewayLine(line.to_string().as_bytes()));
            }
            8 => return self.long_id(number),
            _ => {}
        }
        let kind = match odd {
            3 => "shutdown",
            4 => "other",
            _ => self.random.pick(&TYPES),
        };
        let sid = format!("s{}", self.random.below(4));
        let id = match self.random.below(12) {
            0 if kind != "other" => None,
            // The id of a turn that may still live, given to another one.
            1 if kind == "turn.start" && number > 1 => {
                let id = format!("r{}", number - 1);
                self.shared.insert(id.clone());
                Some(id)
            }
            _ => Some(format!("r{number}")),
        };
        let mut frame = json!({"type": kind, "sid": sid, "n": number});
        if let Some(id) = &id {
            frame["request_id"] = json!(id);
        }
        let name = id.clone().unwrap_or_else(|| format!("nameless {sid}"));
        *self.owed.entry((kind, name)).or_default() += 1;
        self.step(Event::GatewayLine(frame.to_string().as_bytes()));
    }

    /// A line of a known type that is no JSON: an `error` answers it.
    fn broken_line(&mut self, number: u64) {
        let kind = match self.random.below(14) {
            0 => "host.restart",
            1 | 2 => "shutdown",
            _ => self.random.pick(&TYPES),
        };
        let id = format!("r{number}");
        let answered = if kind == "turn.start" { kind } else { "other" };
        *self.owed.entry((answered, id.clone())).or_default() += 1;
        let sid = self.random.below(4);
        let line =
            format!(r#"{{"type":"{kind}","sid":"s{sid}","request_id":"{id}","n":{number}, broken"#);
        self.step(Event::GatewayLine(line.as_bytes()));
    }

    /// A line that is too long, of which the head is seen.
    fn long_line(&mut self, number: u64) {
        let kind = self.random.pick(&TYPES);
        let id = format!("r{number}");
        let answered = if *kind == "turn.start" { kind } else { "other" };
        *self.owed.entry((answered, id.clone())).or_default() += 1;
        let head = format!(r#"{{"type":"{kind}","sid":"s1","request_id":"{id}","text":"xx"#);
        let head = head.as_bytes();
        self.step(Event::GatewayLineTooLong { head, bytes: 9_999 });
    }

    /// A frame whose id is too long to be given back: its answer has one that the host made.
    fn long_id(&mut self, number: u64) {
        let kind = *self.random.pick(&["turn.start", "control", "respond"]);
        let sid = format!("s{}", self.random.below(4));
        let id = "x".repeat(limits::max_request_id_bytes(limits::MIN_MAX_FRAME_BYTES));
        let name = format!("nameless {sid}");
        *self.owed.entry((kind, name)).or_default() += 1;
        let frame = json!({"type": kind, "sid": sid, "n": number, "request_id": id});
        self.step(Event::GatewayLine(frame.to_string().as_bytes()));
    }

    fn host_event(&mut self) {
        let Some(host) = &mut self.host else {
            return;
        };
        if !host.running || host.stuck {
            return;
        }
        if let Some(exit) = host.dying
            && self.random.one_in(2)
        {
            let _ = exit;
            return self.exit();
        }
        if !host.accepted && host.hello_at.is_none() {
            let line = match self.random.below(40) {
                0 => r#"{"type":"hello","protocol_version":2}"#,
                1 => r#"{"type":"hello","home":"/home/b"}"#,
                2 => r#"{"type":"hello","boot_id":[]}"#,
                3 => "junk",
                4 => r#"{"type":"hb"}"#,
                5 => return self.exit_by_itself(),
                _ => {
                    host.hello_at = Some(self.now);
                    r#"{"type":"hello","home":"/home/a","boot_id":"b","heartbeat_secs":15}"#
                }
            };
            return self.step(Event::HostLine(line.as_bytes()));
        }
        match self.random.below(19) {
            16 if self.random.one_in(4) => self.step(Event::HostPipeClosed),
            17 => self.answer_too_long(),
            18 => {
                let hello = r#"{"type":"hello","home":"/home/a","boot_id":"b"}"#;
                self.step(Event::HostLine(hello.as_bytes()));
            }
            0 => self.exit_by_itself(),
            1 => self.step(Event::HostLine(br#"{"type":"hb"}"#)),
            2 => self.step(Event::HostLine(b"{\"type\":\"hb\"")),
            3 => self.repeat_answer(),
            4 => {
                let id = self.random.below(6);
                let name = format!("srq-{id}");
                if self.random.one_in(3) {
                    let line = json!({"type": "rpc", "sid": "s1", "message":
                        {"method": "event", "params":
                            {"type": "request.cancel", "payload": {"id": name}}}});
                    self.questions.remove(&name);
                    return self.step(Event::HostLine(line.to_string().as_bytes()));
                }
                self.questions.insert(name);
                let line = json!({"type": "rpc", "sid": "s1", "message":
                    {"id": format!("srq-{id}"), "method": "clarify", "params": {}}});
                self.step(Event::HostLine(line.to_string().as_bytes()));
            }
            _ => self.answer(),
        }
    }

    fn exit_by_itself(&mut self) {
        let exit = match self.random.below(3) {
            0 => Exit::Code(0),
            1 => Exit::Code(3),
            _ => Exit::Signal(11),
        };
        if let Some(host) = &mut self.host {
            host.dying = Some(exit);
        }
        self.exit();
    }

    /// The host's process ends; a part of what it was sent was written to it.
    fn exit(&mut self) {
        let Some(host) = &mut self.host else { return };
        host.running = false;
        let exit = host.dying.unwrap_or(Exit::Code(0));
        let read: u64 = host.total - host.inbox_bytes();
        let written = read + self.random.below(host.total - read + 1);
        for (offset, line) in &host.sent {
            if *offset < written {
                self.begun.insert(line.clone());
            }
        }
        if host
            .hello_at
            .is_some_and(|at| self.now - at >= from_ms(limits::STABLE_MS))
        {
            self.restarts.clear();
        }
        self.step(Event::HostExited { exit, written });
        assert!(self.questions.is_empty(), "a question outlives its host");
    }

    fn answer(&mut self) {
        let Some(host) = &mut self.host else { return };
        let Some(mut work) = host.inbox.pop_front() else {
            return;
        };
        if self.random.one_in(8) {
            // Answered out of order, or never.
            host.inbox.push_back(work);
            return;
        }
        if work.id.is_none() && work.kind == "turn.start" && self.random.one_in(2) {
            self.next_id += 1;
            let made = format!("made {}", self.next_id);
            let line =
                json!({"type": "turn.accepted", "sid": work.sid, "request_id": made}).to_string();
            work.id = Some(made);
            self.step(Event::HostLine(line.as_bytes()));
        }
        let line = self.answer_line(&work);
        if let Some(host) = &mut self.host {
            host.answered.push(work);
        }
        self.step(Event::HostLine(line.as_bytes()));
    }

    /// An answer that is too long is lost, but not the one that is owed.
    fn answer_too_long(&mut self) {
        let Some(host) = &mut self.host else { return };
        let Some(work) = host.inbox.pop_front() else {
            return;
        };
        host.answered.push(work.clone());
        let line = self.answer_line(&work);
        let head = line.trim_end_matches('}').as_bytes();
        let mut head = head.to_vec();
        head.extend_from_slice(b",\"text\":\"xx");
        self.step(Event::HostLineTooLong {
            head: &head,
            bytes: 9_999,
        });
    }

    fn answer_line(&mut self, work: &Work) -> String {
        let is_error = work.id.is_some() && self.random.one_in(6);
        let kind = if is_error {
            "error"
        } else {
            answer_of(work.kind)
        };
        let id = match &work.id {
            Some(id) => id.clone(),
            None => {
                self.next_id += 1;
                format!("made {}", self.next_id)
            }
        };
        json!({"type": kind, "sid": work.sid, "request_id": id}).to_string()
    }

    /// A faulty host answers a frame for a second time.
    fn repeat_answer(&mut self) {
        let Some(host) = &self.host else { return };
        let named = host.answered.iter().filter(|work| work.kind != "other");
        let named: Vec<Work> = named.filter(|work| work.id.is_some()).cloned().collect();
        if named.is_empty() {
            return;
        }
        let work = self.random.pick(&named).clone();
        let id = work.id.clone().unwrap_or_default();
        // An id that still lives elsewhere cannot be told from a first answer.
        if self
            .owed
            .get(&(work.kind, id.clone()))
            .is_some_and(|count| *count > 0)
        {
            return;
        }
        let line = json!({"type": answer_of(work.kind), "sid": work.sid, "request_id": id});
        self.step(Event::HostLine(line.to_string().as_bytes()));
    }

    /// One step of the core, and all that follows from its actions.
    fn step(&mut self, event: Event<'_>) {
        assert!(self.over.is_none(), "an event after the end");
        let line = match &event {
            Event::GatewayLine(line) | Event::HostLine(line) => {
                String::from_utf8_lossy(line).into_owned()
            }
            _ => String::new(),
        };
        let mut actions = Vec::new();
        if self.shown {
            eprintln!("{} ms: {event:?} {line}", self.now / from_ms(1));
        }
        self.core.step(event, self.now, &mut actions);
        if self.shown {
            eprintln!("    {actions:?}");
        }
        for action in actions {
            self.act(action, &line);
        }
    }

    fn act(&mut self, action: Action, line: &str) {
        assert!(self.over.is_none(), "{action:?} after the end");
        match action {
            Action::RelayToHost => self.deliver(line),
            Action::SendToHost(line) => self.deliver(&String::from_utf8_lossy(&line)),
            Action::CloseHostInput => {
                let host = self.running_host();
                assert!(!host.input_closed);
                host.input_closed = true;
                if !host.deaf && !host.stuck {
                    host.dying.get_or_insert(Exit::Code(0));
                }
            }
            Action::RelayToGateway => self.hear_line(line),
            Action::Tell(notice) => self.hear_notice(notice),
            Action::Spawn => self.spawn(),
            Action::Register { .. } => {
                let result = if self.random.one_in(20) {
                    Err("no space".to_owned())
                } else {
                    self.running_host().accepted = true;
                    Ok(())
                };
                self.step(Event::Registered(result));
            }
            Action::SignalHost(signal) => {
                let host = self.running_host();
                match signal {
                    Signal::Kill if host.unkillable => {
                        host.stuck = true;
                        host.dying = None;
                    }
                    Signal::Kill => {
                        host.killed = true;
                        host.dying = Some(Exit::Signal(9));
                    }
                    Signal::Terminate if !host.deaf && !host.stuck => {
                        host.dying.get_or_insert(Exit::Code(0));
                    }
                    Signal::Terminate | Signal::Continue => {}
                }
            }
            Action::SignalSession(signal) => {
                let random = self.random.below(3) as usize;
                let host = self.ended_host();
                host.session = match signal {
                    Signal::Kill => 0,
                    _ => host.session.saturating_sub(random),
                };
                let left = host.session;
                self.step(Event::SessionLeft(left));
            }
            Action::CountSession => {
                let left = self.ended_host().session;
                self.step(Event::SessionLeft(left));
            }
            Action::Reap => {
                self.ended_host();
                self.host = None;
            }
            Action::Log(..) => {}
            Action::End(code) => self.over = Some(code),
        }
    }

    fn running_host(&mut self) -> &mut Host {
        let host = self.host.as_mut().expect("there is a host");
        assert!(host.running, "an ended host is signalled or written to");
        host
    }

    fn ended_host(&mut self) -> &mut Host {
        let host = self.host.as_mut().expect("the host is not reaped");
        assert!(!host.running, "a session is ended under its host");
        host
    }

    fn spawn(&mut self) {
        assert!(self.host.is_none(), "a second host beside the first");
        if self.had_spawn && !self.asked_restart {
            let window = from_ms(self.core.rules.respawn.window_ms);
            self.restarts.push_back(self.now);
            while self
                .restarts
                .front()
                .is_some_and(|at| at + window <= self.now)
            {
                self.restarts.pop_front();
            }
            let max = self.core.rules.respawn.max;
            assert!(self.restarts.len() <= max, "more restarts than {max}");
        } else {
            self.restarts.clear();
        }
        self.asked_restart = false;
        self.had_spawn = true;
        if self.random.one_in(20) {
            let message = "no such file".to_owned();
            return self.step(Event::SpawnFailed { message });
        }
        self.host = Some(Host {
            accepted: false,
            running: true,
            deaf: self.random.one_in(4),
            unkillable: self.random.one_in(50),
            stuck: false,
            killed: false,
            greeted: false,
            dying: None,
            input_closed: false,
            sent: Vec::new(),
            total: 0,
            inbox: VecDeque::new(),
            answered: Vec::new(),
            session: self.random.below(3) as usize,
            hello_at: None,
        });
        self.step(Event::Spawned);
    }

    fn deliver(&mut self, line: &str) {
        let numbered = line.contains("\"n\":") || line.starts_with("junk");
        assert!(
            !numbered || self.delivered.insert(line.to_owned()),
            "{line} is sent a second time"
        );
        let mut frame: Value = serde_json::from_str(line).unwrap_or(Value::Null);
        if let Some(whole) = line.strip_suffix(", broken") {
            frame = serde_json::from_str(&format!("{whole}}}")).expect("a frame but for its end");
            if frame["type"] != "turn.start" {
                frame["type"] = json!("other");
            }
        } else if frame["wait_ms"].is_string() {
            frame["type"] = json!("other");
        }
        let max_id = limits::max_request_id_bytes(limits::MIN_MAX_FRAME_BYTES);
        let host = self.running_host();
        assert!(host.accepted, "{line} is sent before hello");
        assert!(!host.input_closed, "{line} is sent after the end of input");
        host.sent.push((host.total, line.to_owned()));
        host.total += line.len() as u64 + 1;
        if let Some(kind) = frame["type"].as_str().filter(|kind| *kind != "hello.ack") {
            let text = |key: &str| frame[key].as_str().map(str::to_owned);
            host.inbox.push_back(Work {
                kind: TYPES
                    .iter()
                    .chain(&["shutdown", "other"])
                    .find(|known| **known == kind)
                    .expect("a known type"),
                id: text("request_id").filter(|id| id.len() + 2 <= max_id),
                sid: text("sid").unwrap_or_default(),
            });
        }
    }

    /// Counts an answer.
    fn settle(&mut self, kind: &'static str, id: &str, sid: &str) {
        let named = self.owed.get_mut(&(kind, id.to_owned()));
        let count = match named {
            Some(count) => Some(count),
            None => self.owed.get_mut(&(kind, format!("nameless {sid}"))),
        };
        match count {
            Some(count) if *count > 0 => *count -= 1,
            _ => panic!("a second answer to {kind} {id} of {sid}, or one to nothing"),
        }
    }

    fn hear_line(&mut self, line: &str) {
        let frame: Value = serde_json::from_str(line).expect("a frame");
        let text = |key: &str| frame[key].as_str().unwrap_or_default().to_owned();
        let (kind, id, sid) = (text("type"), text("request_id"), text("sid"));
        if kind == "hello" {
            let host = self.running_host();
            assert!(!host.greeted, "a second hello of one host");
            host.greeted = true;
        }
        if kind == "error" {
            // Two frames of one id are a turn and another one: an error is for the other.
            let owed = self
                .owed
                .iter()
                .find(|((kind, name), count)| *name == id && **count > 0 && *kind != "turn.start");
            let kind = owed.map(|((kind, _), _)| *kind);
            return self.settle(kind.expect("no error for a turn"), &id, &sid);
        }
        let answered = TYPES
            .iter()
            .chain(&["shutdown"])
            .find(|known| answer_of(known) == kind);
        if let Some(answered) = answered {
            self.settle(answered, &id, &sid);
        }
    }

    fn hear_notice(&mut self, notice: Notice) {
        match notice {
            Notice::Refused { to, state, .. } => {
                let id = to.id.as_json().trim_matches('"').to_owned();
                let is_certain = state == ExecutionState::NotStarted;
                // An id that two turns share says nothing of either.
                if to.kind == Kind::Turn && is_certain && !self.shared.contains(&id) {
                    let quoted = format!("\"{id}\"");
                    let begun = self.begun.iter().any(|line| line.contains(&quoted));
                    assert!(!begun, "{id} had begun");
                }
                let is_junk = to.kind == Kind::Other && id.len() == 32;
                if !is_junk {
                    self.settle(kind_name(to.kind), &id, &to.sid);
                }
            }
            Notice::Interrupted { to, .. } | Notice::InterruptAck { to, .. } => {
                let id = to.id.as_json().trim_matches('"').to_owned();
                self.settle(kind_name(to.kind), &id, &to.sid);
            }
            Notice::TooLong { id, .. } => {
                let id = id.expect("its head shows an id");
                self.settle("other", id.as_json().trim_matches('"'), "");
            }
            Notice::Withdrawn { id, .. } => {
                assert!(self.questions.remove(&id), "{id} was not open");
            }
            Notice::GaveUp { .. }
            | Notice::SessionInfo { .. }
            | Notice::ErrorEvent { .. }
            | Notice::Exited { .. } => {}
        }
    }
}

impl Host {
    /// A lower bound of what the host cannot have read yet: nothing that it answered.
    fn inbox_bytes(&self) -> u64 {
        let unread = self.sent.iter().rev().take(self.inbox.len());
        let bytes = unread.map(|(_, line)| line.len() as u64 + 1).sum::<u64>();
        if self.answered.is_empty() { bytes } else { 0 }
    }
}

fn simulate(seed: u64) -> Result<(), String> {
    let run = std::panic::AssertUnwindSafe(|| World::new(seed).run());
    std::panic::catch_unwind(run)
        .map_err(|_| format!("history {seed} fails; run it alone with TURNHOST_SIM_SEED={seed}"))
}

#[test]
fn random_histories_keep_the_invariants() {
    let variable = |name| std::env::var(name).ok()?.parse::<u64>().ok();
    if let Some(seed) = variable("TURNHOST_SIM_SEED") {
        let mut world = World::new(seed);
        world.shown = true;
        return world.run();
    }
    let histories = variable("TURNHOST_SIM_HISTORIES").unwrap_or(100_000);
    let threads = 2;
    std::thread::scope(|scope| {
        let halves: Vec<_> = (0..threads)
            .map(|first| {
                scope.spawn(move || {
                    (first..histories)
                        .step_by(threads as usize)
                        .try_for_each(simulate)
                })
            })
            .collect();
        for half in halves {
            if let Err(message) = half.join().expect("the histories were run") {
                panic!("{message}");
            }
        }
    });
}
