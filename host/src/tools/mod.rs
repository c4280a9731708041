//! Tools that agents call.
//!
//! May use `session`, `output`, `cancel` and `protocol`.

use serde_json::Value;

/// A tool that could not do what it was asked; a result for the agent, not a dead turn.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ToolError {
    /// There is no such tool.
    #[error("unknown tool `{name}`; this host has {}", known(offered))]
    Unknown {
        /// The name that was called.
        name: String,
        /// The tools that there are.
        offered: Vec<String>,
    },
}

fn known(offered: &[String]) -> String {
    if offered.is_empty() {
        "no tools".to_owned()
    } else {
        offered.join(", ")
    }
}

impl ToolError {
    /// The error as a result that an agent reads.
    #[must_use]
    pub fn to_result(&self) -> Value {
        serde_json::json!({ "error": self.to_string() })
    }
}

/// Runs the tool `name` with `args`.
///
/// # Errors
/// There is no such tool.
pub fn call(name: &str, _args: &Value) -> Result<Value, ToolError> {
    Err(ToolError::Unknown {
        name: name.to_owned(),
        offered: Vec::new(),
    })
}
