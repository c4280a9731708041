//! Drives real turnhost processes over real pipes.
//!
//! A test starts a [`Host`], writes lines to it and waits for frames. Nothing here sleeps to be
//! right: waits end with what they wait for, and a deadline only turns a hang into a failure. Each
//! frame that arrives is held against what SPEC says of all frames, so every test checks that too.
//! A test that fails prints what went both ways, what the host wrote to stderr, and its log.
//!
//! Invariant: a test ends and reaps only what it started; nothing outlives its [`Host`].

pub mod bench;
pub mod binary;
pub mod frame;
pub mod gateway;
pub mod host;
mod options;
mod pipes;
pub mod suite;

pub use frame::Frame;
pub use gateway::{Gateway, Supervision};
pub use host::Host;
pub use options::Options;

use std::path::Path;

use rustix::fs::{CWD, FileType, Mode, mknodat};
use serde_json::{Value, json};

/// A `turn.start` with the given prompt, under the key that the `sid` is by default.
#[must_use]
pub fn turn(sid: &str, request_id: &str, text: &str) -> Value {
    json!({"type": "turn.start", "sid": sid, "request_id": request_id, "text": text})
}

/// A `turn.start` that plays the steps of SPEC §11.
#[must_use]
pub fn script_turn(sid: &str, request_id: &str, steps: &Value) -> Value {
    turn(sid, request_id, &script(steps))
}

/// The prompt that plays `steps`.
#[must_use]
pub fn script(steps: &Value) -> String {
    format!("!script {steps}")
}

/// An `interrupt`.
#[must_use]
pub fn interrupt(sid: &str, request_id: &str) -> Value {
    json!({"type": "interrupt", "sid": sid, "request_id": request_id})
}

/// A frame of a type that nobody knows: the cheapest question with an answer.
#[must_use]
pub fn probe(request_id: &str) -> Value {
    json!({"type": "probe", "request_id": request_id})
}

/// Makes a named pipe, which lets whoever opens or reads it wait for another end.
///
/// # Panics
/// There is no room for it.
pub fn make_pipe(path: &Path) {
    let mode = Mode::RUSR | Mode::WUSR;
    mknodat(CWD, path, FileType::Fifo, mode, 0).expect("a folder takes a pipe");
}
