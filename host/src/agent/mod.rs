//! Agents: what runs a turn.
//!
//! May use `tools`, `session`, `output`, `pool`, `cancel` and `protocol`.
//!
//! An agent first looks at its task, while it is still certain that nothing ran; then it runs on a
//! [`Stage`], which is all that it sees of the host.

pub mod script;
mod stage;

use std::sync::Arc;

use serde_json::value::RawValue;
use turnhost_protocol::frame::input::Prompt;

pub use stage::Stage;

/// What an agent is asked to do.
pub struct Task {
    /// The prompt.
    pub prompt: Prompt,
    /// What was said before, oldest first.
    pub history: Arc<Vec<Box<RawValue>>>,
}

/// An agent, ready to run one task.
pub type Run = Box<dyn FnOnce(&Stage<'_>) -> Result<Answer, AgentError> + Send>;

/// Something that runs turns; shared by all sessions that use it.
pub trait Agent: Send + Sync {
    /// Name of the model that sessions show.
    fn model(&self) -> &str;

    /// Looks at `task` and gets ready to run it.
    ///
    /// # Errors
    /// The prompt is none that this agent can run, and why; nothing ran.
    fn prepare(&self, task: &Task) -> Result<Run, InvalidPrompt>;
}

/// What an agent says in the end.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Answer {
    /// The final text; `None` stands for what was streamed.
    pub text: Option<String>,
}

/// A prompt that an agent cannot run.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct InvalidPrompt(pub String);

/// Why an agent did not finish.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AgentError {
    /// It was asked to end.
    #[error("interrupted")]
    Interrupted,
    /// It failed.
    #[error("{0}")]
    Failed(String),
}
