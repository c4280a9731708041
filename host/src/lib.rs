//! turnhost: a compute host that runs agent turns on a thread pool and speaks newline JSON.
//!
//! # The way of a turn
//!
//! stdin → [`input`] reads a line and finds its handler → [`session`] claims the session → [`pool`]
//! → [`turn`] → [`agent`] ↔ [`tools`] → events → [`output`] → stdout. Nothing goes back up.
//!
//! # Threads
//!
//! | thread | does | never |
//! | --- | --- | --- |
//! | main (reader) | reads lines, dispatches, answers | runs agents or tools, reads files |
//! | `writer` | writes what is queued | waits for a turn |
//! | `worker` | runs turns | holds a lock while it waits |
//! | `timers` | activity frames, the patience of `session.close` | waits |
//! | `life` | heartbeat, signals, the parent | takes a lock that a turn can hold |
//! | `deadline` | ends the process when its time is over | takes a lock at all |
//! | `drain` | waits for the end, then sees to it | |
//! | `log` | writes records to the log file and to stderr | |
//!
//! # Layers
//!
//! `main`, `config`, `input`, `life`, `turn`, `agent`, `tools`, `session`, and at the bottom
//! `output`, `pool`, `timers`, `cancel` and `log`. Imports only go down; `tests/tests/tidy.rs` in
//! the workspace holds them to it.

pub mod agent;
pub mod cancel;
pub mod config;
pub mod input;
pub mod life;
pub mod log;
pub mod output;
pub mod pool;
pub mod session;
pub mod timers;
pub mod tools;
pub mod turn;

use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use turnhost_protocol::config::AgentName;
use turnhost_protocol::frame::output::{Hello, Output as Frame, shown};
use turnhost_protocol::limits::PROTOCOL_VERSION;
use turnhost_protocol::process::random_hex32;

use agent::Agent;
use config::Settings;
use input::Dispatcher;
use life::{Cause, Drain, Ending, Life, Parent, Pulse};
use log::Log;
use output::Output;
use pool::Pool;
use session::{Profile, Sessions, Setup};
use timers::Timers;
use turn::{Agents, Turns};

/// Runs a host on stdin and `stdout` until it ends the process.
///
/// # Errors
/// A thread or signal handler cannot be set up; `hello` may have been written then.
pub fn run(settings: Settings, stdin: OwnedFd, stdout: OwnedFd) -> io::Result<()> {
    let life = Life::prepare(|| Parent::watch(settings.parent))?;
    let log = Log::start(&settings.home.logs(), &settings.log_filter)?;
    log::say_panics();
    let ending = Ending::start()?;
    let closed = ending.clone();
    let output = Output::start(stdout, settings.max_frame_bytes, move || {
        closed.begin(Cause::StdoutClosed);
    })?;
    let cwd = std::env::current_dir().unwrap_or_else(|_| PathBuf::from("/"));
    let cwd = shown(&cwd).into_owned();
    say_hello(&settings, &cwd, &output);
    for warning in &settings.warnings {
        tracing::warn!("{warning}");
    }

    let pool = Pool::new(settings.workers);
    let setup = Setup {
        profile: Profile::default_of(settings.home.path()),
        cwd: cwd.clone(),
        agent: AgentName::Script,
        model: settings.script.model().to_owned(),
    };
    let sessions = Sessions::new(output.clone(), setup);
    let timers = Timers::start()?;
    let agents = Agents {
        home: settings.home.clone(),
        flag: settings.agent,
        script: Arc::new(settings.script),
    };
    let turns = Turns::new(sessions.clone(), timers.clone(), agents, cwd);
    let drain = Drain {
        ending: ending.clone(),
        sessions: sessions.clone(),
        pool: pool.clone(),
        output: output.clone(),
        log,
    };
    drain.start()?;
    let pulse = Pulse {
        pool: pool.clone(),
        sessions: sessions.clone(),
        output: output.clone(),
    };
    let heartbeat = Some(settings.heartbeat_secs).filter(|seconds| *seconds > 0.0);
    life.start(
        heartbeat.map(Duration::from_secs_f64),
        pulse,
        ending.clone(),
    )?;

    let dispatcher = Dispatcher {
        output,
        sessions,
        pool,
        turns: Arc::new(turns),
        timers,
        ending: ending.clone(),
        max_frame_bytes: settings.max_frame_bytes,
        max_queued_turns: settings.max_queued_turns,
        queued_bytes: Arc::default(),
    };
    let why = input::read(stdin, settings.max_frame_bytes, &dispatcher);
    tracing::info!("{why}");
    ending.begin(Cause::StdinClosed);
    // The drain ends the process; a turn that began just now still needs this thread's handlers
    // as little as anybody else does.
    loop {
        std::thread::park();
    }
}

/// Writes `hello`, before any other frame.
fn say_hello(settings: &Settings, cwd: &str, output: &Output) {
    let seconds = settings.heartbeat_secs;
    // A whole number is shown as one.
    let heartbeat_secs = if seconds.fract() == 0.0 {
        serde_json::Number::from(seconds as u64)
    } else {
        serde_json::Number::from_f64(seconds).unwrap_or_else(|| 0.into())
    };
    output.reply(&Frame::Hello(Hello {
        host_pid: std::process::id(),
        boot_id: &random_hex32(),
        build_sha: &settings.build_sha,
        version: env!("CARGO_PKG_VERSION"),
        cwd: cwd.into(),
        hermes_home: settings.hermes_home.as_str().into(),
        home: shown(settings.home.path()),
        protocol_version: PROTOCOL_VERSION,
        capabilities: &input::HANDLED,
        workers: settings.workers,
        heartbeat_secs,
    }));
    output.flush();
}
