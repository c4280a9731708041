//! A gateway before a real supervisor: it starts `turnhost-supervisor run` and talks to it.
//!
//! What arrives is kept with the time of its arrival. A test that fails prints what went both ways
//! and what the supervisor wrote to stderr. Invariant: nothing outlives its [`Gateway`], neither
//! the supervisor nor a host of it.

use std::ffi::OsString;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use serde_json::Value;
use tempfile::TempDir;

use crate::binary;
use crate::host::{DEADLINE, Exit};

/// How a supervisor is started.
#[derive(Debug, Clone)]
pub struct Supervision {
    args: Vec<OsString>,
    argv: Vec<OsString>,
    env: Vec<(OsString, OsString)>,
    home: Option<PathBuf>,
    through_shell: Option<String>,
}

impl Supervision {
    /// Of the real host, without heartbeats.
    #[must_use]
    pub fn of_turnhost() -> Self {
        let argv = [binary::turnhost().as_os_str(), "--allow-faults".as_ref()];
        Self::of(argv).args(["--heartbeat-secs", "0"])
    }

    /// Of the host that misbehaves on command.
    #[must_use]
    pub fn of_fake(flags: &[&str]) -> Self {
        let program = [binary::fake_host().as_os_str()];
        Self::of(
            program
                .into_iter()
                .chain(flags.iter().map(|flag| flag.as_ref())),
        )
    }

    /// Of any command line.
    #[must_use]
    pub fn of<A: Into<OsString>>(argv: impl IntoIterator<Item = A>) -> Self {
        Self {
            args: Vec::new(),
            argv: argv.into_iter().map(Into::into).collect(),
            env: Vec::new(),
            home: None,
            through_shell: None,
        }
    }

    /// Adds flags of `run`.
    #[must_use]
    pub fn args<A: Into<OsString>>(mut self, args: impl IntoIterator<Item = A>) -> Self {
        self.args.extend(args.into_iter().map(Into::into));
        self
    }

    /// Adds a variable to the supervisor's environment.
    #[must_use]
    pub fn env(mut self, name: &str, value: &str) -> Self {
        self.env.push((name.into(), value.into()));
        self
    }

    /// Uses `home`, which outlives the supervisor.
    #[must_use]
    pub fn home(mut self, home: &Path) -> Self {
        self.home = Some(home.to_owned());
        self
    }

    /// Lets a shell script start the supervisor: its command line is `"$@"`.
    #[must_use]
    pub fn through_shell(mut self, script: &str) -> Self {
        self.through_shell = Some(script.to_owned());
        self
    }
}

/// A frame, and when it came.
#[derive(Debug, Clone)]
pub struct Arrival {
    /// The frame.
    pub frame: Value,
    /// When its line was read.
    pub at: Instant,
}

#[derive(Default)]
struct State {
    arrivals: Vec<Arrival>,
    faults: Vec<String>,
    transcript: Vec<String>,
    stderr: String,
    ended: bool,
    paused: bool,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state
            .lock()
            .expect("no thread panics while it holds the state")
    }

    fn change(&self, change: impl FnOnce(&mut State)) {
        change(&mut self.lock());
        self.changed.notify_all();
    }
}

/// A running supervisor and what came out of it.
pub struct Gateway {
    home: PathBuf,
    child: Child,
    pidfd: OwnedFd,
    stdin: Option<ChildStdin>,
    shared: Arc<Shared>,
    frame_reader: Option<JoinHandle<()>>,
    /// Ends when the last process that has its stderr ends.
    _log_reader: JoinHandle<()>,
    _own_home: Option<TempDir>,
}

impl Gateway {
    /// Starts a supervisor and waits for the hello of its first host.
    #[must_use]
    pub fn start(how: Supervision) -> Self {
        let gateway = Self::spawn(how);
        gateway.wait_kind("hello", 1);
        gateway
    }

    /// Starts a supervisor that may end at once.
    #[must_use]
    pub fn spawn(how: Supervision) -> Self {
        let own_home = how
            .home
            .is_none()
            .then(|| tempfile::tempdir().expect("a folder"));
        let home = match (&own_home, how.home) {
            (_, Some(home)) => home,
            (Some(folder), None) => folder.path().to_owned(),
            (None, None) => unreachable!("one of the two is there"),
        };
        let mut command = match &how.through_shell {
            None => Command::new(binary::supervisor()),
            Some(script) => {
                let mut command = Command::new("sh");
                command.args(["-c", script, "sh"]).arg(binary::supervisor());
                command
            }
        };
        command.arg("run").arg("--home").arg(&home).args(how.args);
        if !how.argv.is_empty() {
            command.arg("--").args(how.argv);
        }
        let mut child = command
            .env_clear()
            .env("PATH", std::env::var_os("PATH").unwrap_or_default())
            .env("HOME", &home)
            .envs(how.env)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the supervisor can be started");
        let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
        let (Some(stdout), Some(mut stderr)) = (stdout, stderr) else {
            unreachable!("both are piped");
        };
        let shared = Arc::new(Shared::default());
        let (frames, log) = (Arc::clone(&shared), Arc::clone(&shared));
        let frame_reader = thread::spawn(move || read_frames(&frames, BufReader::new(stdout)));
        let log_reader = thread::spawn(move || {
            let mut buffer = [0; 4096];
            while let Ok(count @ 1..) = stderr.read(&mut buffer) {
                let text = String::from_utf8_lossy(&buffer[..count]).into_owned();
                log.change(|state| state.stderr.push_str(&text));
            }
        });
        Self {
            home,
            pidfd: pidfd_open(Pid::from_child(&child), PidfdFlags::empty()).expect("it is ours"),
            stdin: child.stdin.take(),
            child,
            shared,
            frame_reader: Some(frame_reader),
            _log_reader: log_reader,
            _own_home: own_home,
        }
    }

    /// Its home.
    #[must_use]
    pub fn home(&self) -> &Path {
        &self.home
    }

    /// Its pid.
    #[must_use]
    pub fn pid(&self) -> i32 {
        Pid::from_child(&self.child).as_raw_nonzero().get()
    }

    /// Writes a frame.
    pub fn send(&mut self, frame: &Value) {
        self.send_raw(format!("{frame}\n").as_bytes());
    }

    /// Writes bytes as they are. A supervisor that ended takes nothing.
    pub fn send_raw(&mut self, bytes: &[u8]) {
        let shown = String::from_utf8_lossy(&bytes[..bytes.len().min(300)]).into_owned();
        self.shared
            .change(|state| state.transcript.push(format!("→ {}", shown.trim_end())));
        let stdin = self.stdin.as_mut().expect("stdin was not closed before");
        // What was expected of it fails where it is waited for.
        let _ = stdin.write_all(bytes);
    }

    /// Takes the writing end, for a test that writes from a thread of its own.
    pub fn take_stdin(&mut self) -> ChildStdin {
        self.stdin.take().expect("stdin was not closed before")
    }

    /// Ends its input.
    pub fn close_stdin(&mut self) {
        self.shared
            .change(|state| state.transcript.push("→ (closed)".to_owned()));
        self.stdin = None;
    }

    /// Stops reading, after a line at most; [`Self::read_on`] goes on.
    pub fn stop_reading(&self) {
        self.shared.change(|state| state.paused = true);
    }

    /// Reads again.
    pub fn read_on(&self) {
        self.shared.change(|state| state.paused = false);
    }

    /// Has the fake host do something.
    pub fn fake(&mut self, what: &str) {
        self.send(&serde_json::json!({"type": "fake", "do": what}));
    }

    /// Sends the supervisor a signal.
    pub fn signal(&self, signal: Signal) {
        // One that ended is what some tests are about.
        let _ = pidfd_send_signal(&self.pidfd, signal);
    }

    /// Everything that arrived so far.
    #[must_use]
    pub fn arrivals(&self) -> Vec<Arrival> {
        let state = self.shared.lock();
        let (arrivals, faults) = (state.arrivals.clone(), state.faults.clone());
        drop(state);
        assert!(faults.is_empty(), "{faults:#?}");
        arrivals
    }

    /// Every frame so far.
    #[must_use]
    pub fn frames(&self) -> Vec<Value> {
        self.arrivals()
            .into_iter()
            .map(|arrival| arrival.frame)
            .collect()
    }

    /// Every frame so far of a type.
    #[must_use]
    pub fn frames_of_kind(&self, kind: &str) -> Vec<Value> {
        let mut frames = self.frames();
        frames.retain(|frame| frame["type"] == kind);
        frames
    }

    /// Waits until `look` finds something in all that arrived.
    ///
    /// # Panics
    /// After [`DEADLINE`], or when the output ends before.
    pub fn find<T>(&self, what: &str, mut look: impl FnMut(&[Arrival]) -> Option<T>) -> T {
        let deadline = Instant::now() + DEADLINE;
        let mut state = self.shared.lock();
        loop {
            if let Some(found) = look(&state.arrivals) {
                return found;
            }
            let (ended, left) = (
                state.ended,
                deadline.saturating_duration_since(Instant::now()),
            );
            if ended || left.is_zero() {
                drop(state);
                assert!(!ended, "the output ended; still waiting for {what}");
                panic!("waited in vain for {what}");
            }
            let wait = self.shared.changed.wait_timeout(state, left);
            state = wait.expect("no thread panics while it holds the state").0;
        }
    }

    /// The first frame that `is` it.
    pub fn wait_for(&self, what: &str, is: impl Fn(&Value) -> bool) -> Value {
        let mut seen = 0;
        self.find(what, |arrivals| {
            let found = arrivals[seen..].iter().find(|arrival| is(&arrival.frame));
            seen = arrivals.len();
            found.map(|arrival| arrival.frame.clone())
        })
    }

    /// The `count`-th frame of a type.
    pub fn wait_kind(&self, kind: &str, count: usize) -> Value {
        self.find(&format!("{kind} number {count}"), |arrivals| {
            let mut of_kind = arrivals
                .iter()
                .filter(|arrival| arrival.frame["type"] == kind);
            of_kind.nth(count - 1).map(|arrival| arrival.frame.clone())
        })
    }

    /// The answer to the frame with this id: for a turn its terminal frame.
    pub fn answer(&self, id: &str) -> Value {
        self.wait_for(&format!("the answer to {id}"), |frame| {
            frame["request_id"] == id && !matches!(kind(frame), "turn.accepted" | "turn.started")
        })
    }

    /// Sends a frame and waits for its answer.
    pub fn ask(&mut self, frame: &Value) -> Value {
        self.send(frame);
        self.answer(frame["request_id"].as_str().expect("asked with an id"))
    }

    /// The pid that the `count`-th hello named.
    pub fn host_pid(&self, count: usize) -> i32 {
        let hello = self.wait_kind("hello", count);
        let pid = hello["host_pid"].as_i64().expect("a pid");
        i32::try_from(pid).expect("a pid")
    }

    /// What it wrote to stderr so far.
    #[must_use]
    pub fn stderr(&self) -> String {
        self.shared.lock().stderr.clone()
    }

    /// Waits until stderr holds `text`.
    pub fn wait_stderr(&self, text: &str) {
        let deadline = Instant::now() + DEADLINE;
        let mut state = self.shared.lock();
        while !state.stderr.contains(text) {
            let left = deadline.saturating_duration_since(Instant::now());
            let seen = state.stderr.clone();
            assert!(
                !left.is_zero(),
                "waited in vain for {text:?} on stderr:\n{seen}"
            );
            let wait = self.shared.changed.wait_timeout(state, left);
            state = wait.expect("no thread panics while it holds the state").0;
        }
    }

    /// The record of the host, where there is one.
    #[must_use]
    pub fn record(&self) -> Option<Value> {
        let path = self.home.join("state/compute-host.json");
        serde_json::from_slice(&std::fs::read(path).ok()?).ok()
    }

    /// Waits for the end of the supervisor.
    ///
    /// # Panics
    /// It still runs after [`DEADLINE`].
    pub fn exit(&mut self) -> Exit {
        assert!(
            crate::host::wait_exit(&self.pidfd, DEADLINE),
            "the supervisor still runs"
        );
        let exit = Exit::of(self.child.wait().expect("it is ours"));
        // A host that outlives its supervisor still holds stderr.
        if let Some(reader) = self.frame_reader.take() {
            reader.join().expect("a reader of the harness");
        }
        exit
    }
}

impl Drop for Gateway {
    fn drop(&mut self) {
        self.stdin = None;
        self.read_on();
        // Its hosts end with it, by the end of their input or by their own deadline.
        let _ = self.child.kill();
        let _ = self.child.wait();
        for pid in self.hosts() {
            end_host(pid);
        }
        if thread::panicking() {
            let state = self.shared.lock();
            for line in &state.transcript {
                eprintln!("{line}");
            }
            eprintln!("--- stderr of the supervisor\n{}", state.stderr);
        }
    }
}

impl Gateway {
    fn hosts(&self) -> Vec<i32> {
        let state = self.shared.lock();
        let hellos = state
            .arrivals
            .iter()
            .filter(|arrival| kind(&arrival.frame) == "hello");
        let pids = hellos.filter_map(|arrival| arrival.frame["host_pid"].as_i64());
        let of_record = self.record().and_then(|record| record["host_pid"].as_i64());
        pids.chain(of_record)
            .filter_map(|pid| i32::try_from(pid).ok())
            .collect()
    }
}

/// Ends a host that a test left, if it still is one of ours.
fn end_host(pid: i32) {
    let Some(pid) = Pid::from_raw(pid) else {
        return;
    };
    let Ok(pidfd) = pidfd_open(pid, PidfdFlags::empty()) else {
        return;
    };
    let program = std::fs::read_link(format!("/proc/{}/exe", pid.as_raw_nonzero()));
    let ours = [binary::turnhost(), binary::fake_host()];
    if program.is_ok_and(|program| ours.contains(&program.as_path())) {
        let _ = pidfd_send_signal(&pidfd, Signal::KILL);
    }
}

fn kind(frame: &Value) -> &str {
    frame["type"].as_str().unwrap_or_default()
}

fn read_frames(shared: &Shared, stdout: impl BufRead) {
    for line in stdout.lines() {
        let Ok(line) = line else { break };
        let at = Instant::now();
        let mut state = shared.lock();
        while state.paused {
            state = shared
                .changed
                .wait(state)
                .expect("no thread panics while it holds the state");
        }
        let mut shown: String = line.chars().take(300).collect();
        shown.insert_str(0, "← ");
        state.transcript.push(shown);
        match serde_json::from_str(&line) {
            Ok(frame) => state.arrivals.push(Arrival { frame, at }),
            Err(error) => state.faults.push(format!("no frame ({error}): {line}")),
        }
        drop(state);
        shared.changed.notify_all();
    }
    shared.change(|state| state.ended = true);
}

/// Whether a process lives; a zombie does not.
#[must_use]
pub fn lives(pid: i32) -> bool {
    let stat = turnhost_protocol::process::Stat::of(pid);
    matches!(stat, Ok(Some(stat)) if !stat.is_zombie())
}

/// Waits until a process is gone, zombie included.
///
/// # Panics
/// It is still there after [`DEADLINE`].
pub fn wait_gone(pid: i32) {
    let deadline = Instant::now() + DEADLINE;
    while matches!(turnhost_protocol::process::Stat::of(pid), Ok(Some(_))) {
        assert!(Instant::now() < deadline, "process {pid} is still there");
        thread::sleep(Duration::from_millis(5));
    }
}

/// Whether a process ends, or is a zombie, within [`DEADLINE`].
#[must_use]
pub fn ends(pid: i32) -> bool {
    let deadline = Instant::now() + DEADLINE;
    while lives(pid) && Instant::now() < deadline {
        thread::sleep(Duration::from_millis(5));
    }
    !lives(pid)
}
