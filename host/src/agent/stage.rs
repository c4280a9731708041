//! What a running agent may touch: its stream, its interrupt, its place.

use std::borrow::Cow;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use serde_json::Value;
use serde_json::value::RawValue;
use turnhost_protocol::json;
use turnhost_protocol::limits::MAX_TURN_TEXT_BYTES;
use turnhost_protocol::process::random_hex32;
use turnhost_protocol::rpc::{Event, ToolComplete, ToolStart};

use super::AgentError;
use crate::output::{Delta, TurnClosed};
use crate::pool::{Branch, Place};
use crate::session::Turn;
use crate::tools::{self, ToolError};

/// The host as an agent sees it during one turn. Several threads of a turn may share it.
pub struct Stage<'a> {
    turn: &'a Turn,
    place: &'a Place,
    streamed: Mutex<Streamed>,
}

/// The text that was streamed, as far as it is kept.
#[derive(Debug, Default, Clone)]
pub struct Streamed {
    /// Its beginning.
    pub text: String,
    /// Whether there was more.
    pub truncated: bool,
}

/// A turn that has its terminal frame has nobody to tell: it ends like an interrupted one.
impl From<TurnClosed> for AgentError {
    fn from(_: TurnClosed) -> Self {
        Self::Interrupted
    }
}

impl<'a> Stage<'a> {
    /// The stage of `turn`, which computes on `place`.
    #[must_use]
    pub fn new(turn: &'a Turn, place: &'a Place) -> Self {
        Self {
            turn,
            place,
            streamed: Mutex::default(),
        }
    }

    /// Streams text of the message.
    ///
    /// # Errors
    /// The turn was asked to end.
    pub fn delta(&self, text: &str) -> Result<(), AgentError> {
        self.keep(text);
        self.stream(Delta::Message, text)
    }

    /// Streams text of the reasoning.
    ///
    /// # Errors
    /// The turn was asked to end.
    pub fn reasoning(&self, text: &str) -> Result<(), AgentError> {
        self.stream(Delta::Reasoning, text)
    }

    fn stream(&self, kind: Delta, text: &str) -> Result<(), AgentError> {
        self.turn.note_progress();
        self.turn.port.delta(kind, text, || self.turn.hurries())?;
        self.check()
    }

    fn keep(&self, text: &str) {
        let mut streamed = self.streamed.lock();
        if streamed.truncated {
            // What is kept is a beginning, without a hole.
            return;
        }
        let room = MAX_TURN_TEXT_BYTES - streamed.text.len();
        let kept = json::prefix(text, room);
        streamed.text.push_str(kept);
        streamed.truncated = kept.len() < text.len();
    }

    /// What was streamed so far.
    #[must_use]
    pub fn streamed(&self) -> Streamed {
        self.streamed.lock().clone()
    }

    /// Whether to go on.
    ///
    /// # Errors
    /// The turn was asked to end.
    pub fn check(&self) -> Result<(), AgentError> {
        if self.turn.cancel.is_set() {
            Err(AgentError::Interrupted)
        } else {
            Ok(())
        }
    }

    /// Waits for `duration`.
    ///
    /// # Errors
    /// The turn was asked to end, now or meanwhile.
    pub fn sleep(&self, duration: Duration) -> Result<(), AgentError> {
        if self.turn.cancel.wait(duration) {
            Err(AgentError::Interrupted)
        } else {
            Ok(())
        }
    }

    /// Counts a part of the turn that runs at once with the others, until the guard drops.
    #[must_use]
    pub fn branch(&self) -> Branch<'_> {
        self.place.branch()
    }

    /// Waits, by `join`, for the branches that were opened.
    pub fn join<T>(&self, join: impl FnOnce() -> T) -> T {
        self.place.join_while(join)
    }

    /// Calls a tool and shows the call; a failure is a result too.
    ///
    /// # Errors
    /// The turn was asked to end.
    pub fn tool(&self, name: &str, args: &Value) -> Result<Value, AgentError> {
        let tool_id = format!("call-{}", &random_hex32()[..12]);
        let raw_args = raw(args);
        self.event(Event::ToolStart(ToolStart {
            tool_id: &tool_id,
            name,
            args: &raw_args,
            truncated: false,
        }))?;
        let began = Instant::now();
        let outcome = tools::call(name, args);
        let is_error = outcome.is_err();
        let result = outcome.unwrap_or_else(|error: ToolError| error.to_result());
        self.event(Event::ToolComplete(ToolComplete {
            tool_id: &tool_id,
            name,
            args: &raw_args,
            result: &raw(&result),
            duration_s: began.elapsed().as_secs_f64(),
            is_error,
            truncated: false,
        }))?;
        Ok(result)
    }

    fn event(&self, event: Event<'_>) -> Result<(), AgentError> {
        self.turn.note_progress();
        self.turn.port.event(event, || self.turn.hurries())?;
        self.check()
    }
}

fn raw(value: &Value) -> Cow<'static, RawValue> {
    serde_json::value::to_raw_value(value).map_or(Cow::Borrowed(RawValue::NULL), Cow::Owned)
}
