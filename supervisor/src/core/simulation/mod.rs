//! Seeded histories of a gateway, hosts and time against the core, checked for its invariants.
//!
//! The seed of each history is printed when one fails; `TURNHOST_SIM_SEED` runs that one alone,
//! `TURNHOST_SIM_HISTORIES` changes how many are run.

mod checks;
mod hosts;

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
