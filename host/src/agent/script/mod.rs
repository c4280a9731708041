//! The script agent: plays steps, for tests, demonstrations and replay. Needs nothing.
//!
//! The steps of a turn come from its prompt (`!script [ … ]`), else from the script file, one list
//! for each turn in the order in which the turns start in the host, else they echo the prompt.

mod steps;

use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use serde_json::Value;
use turnhost_protocol::file::read_text;
use turnhost_protocol::limits::MAX_SCRIPT_FILE_BYTES;

use super::{Agent, AgentError, Answer, InvalidPrompt, Run, Stage, Task};
use steps::{Step, Steps};

/// Plays steps.
pub struct ScriptAgent {
    file: Option<ScriptFile>,
    allow_faults: bool,
}

struct ScriptFile {
    turns: Vec<Steps>,
    next: AtomicUsize,
}

/// A script file that cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("script file {path}: {message}")]
pub struct ScriptFileError {
    path: String,
    message: String,
}

const MARK: &str = "!script";

impl ScriptAgent {
    /// An agent that plays `file`, where there is one. Steps that break the host on purpose need
    /// `allow_faults`.
    ///
    /// # Errors
    /// The file cannot be read, or holds something that is no step.
    pub fn new(file: Option<&Path>, allow_faults: bool) -> Result<Self, ScriptFileError> {
        let file = file
            .map(|path| {
                let error = |message| ScriptFileError {
                    path: path.display().to_string(),
                    message,
                };
                let text =
                    read_text(path, MAX_SCRIPT_FILE_BYTES).map_err(|why| error(why.to_string()))?;
                let turns = steps::parse_file(&text, allow_faults).map_err(error)?;
                Ok(ScriptFile {
                    turns,
                    next: AtomicUsize::new(0),
                })
            })
            .transpose()?;
        Ok(Self { file, allow_faults })
    }

    fn plan(&self, prompt: String) -> Result<Plan, InvalidPrompt> {
        if let Some(list) = prompt.strip_prefix(MARK)
            && (list.is_empty() || list.starts_with(char::is_whitespace))
        {
            return steps::parse_list(list, self.allow_faults)
                .map(Plan::Steps)
                .map_err(|message| InvalidPrompt(format!("{MARK}: {message}")));
        }
        Ok(match &self.file {
            Some(file) => {
                let turn = file.next.fetch_add(1, Ordering::Relaxed);
                Plan::Steps(file.turns[turn.min(file.turns.len() - 1)].clone())
            }
            None => Plan::Echo(prompt),
        })
    }
}

/// What a turn does.
#[derive(Debug, PartialEq)]
enum Plan {
    Steps(Steps),
    /// Streams the prompt word by word; joined, the deltas are the prompt.
    Echo(String),
}

impl Agent for ScriptAgent {
    fn model(&self) -> &str {
        "script"
    }

    fn prepare(&self, task: &Task) -> Result<Run, InvalidPrompt> {
        let plan = self.plan(task.prompt.to_text())?;
        Ok(Box::new(move |stage| match plan {
            Plan::Echo(prompt) => {
                for word in steps::words(&prompt) {
                    stage.delta(word)?;
                }
                Ok(Answer::default())
            }
            Plan::Steps(steps) => {
                let mut player = Player {
                    stage,
                    last: Value::Null,
                    said: None,
                };
                player.play(&steps)?;
                Ok(Answer { text: player.said })
            }
        }))
    }
}

/// Plays one list of steps.
struct Player<'a> {
    stage: &'a Stage<'a>,
    /// `$last`
    last: Value,
    said: Option<String>,
}

impl Player<'_> {
    fn play(&mut self, steps: &[Step]) -> Result<(), AgentError> {
        for step in steps {
            self.stage.check()?;
            self.step(step)?;
        }
        self.stage.check()
    }

    fn step(&mut self, step: &Step) -> Result<(), AgentError> {
        match step {
            Step::Delta(text) => self.stage.delta(text)?,
            Step::Deltas { count, text, every } => {
                for index in 0..*count {
                    if index > 0 && !every.is_zero() {
                        self.stage.sleep(*every)?;
                    }
                    self.stage.delta(text)?;
                }
            }
            Step::Reasoning(text) => self.stage.reasoning(text)?,
            Step::Sleep(duration) => self.stage.sleep(*duration)?,
            Step::Stuck(duration) => stay_stuck(*duration),
            Step::Tool { name, args } => self.last = self.stage.tool(name, args)?,
            Step::Parallel(lists) => self.parallel(lists)?,
            Step::Say(text) => {
                self.said = Some(if text.contains("$last") {
                    text.replace("$last", &self.last.to_string())
                } else {
                    text.clone()
                });
            }
            Step::Fail(message) => return Err(AgentError::Failed(message.clone())),
            Step::Panic(message) => panic!("{message}"),
            Step::Abort => std::process::abort(),
            Step::Exit(code) => std::process::exit(*code),
        }
        Ok(())
    }

    /// Runs `lists` at once. The first failure or panic in their order is that of the step.
    fn parallel(&mut self, lists: &[Steps]) -> Result<(), AgentError> {
        let stage = self.stage;
        let outcomes: Vec<_> = thread::scope(|scope| {
            let parts: Vec<_> = lists
                .iter()
                .map(|steps| {
                    let branch = stage.branch();
                    thread::Builder::new()
                        .name("script-part".into())
                        .spawn_scoped(scope, move || {
                            let _branch = branch;
                            let mut part = Player {
                                stage,
                                last: Value::Null,
                                said: None,
                            };
                            part.play(steps).map(|()| (part.last, part.said))
                        })
                })
                .collect();
            stage.join(|| {
                parts
                    .into_iter()
                    .map(|part| match part {
                        Ok(part) => part.join(),
                        Err(error) => Ok(Err(AgentError::Failed(format!(
                            "cannot start a thread for a parallel list: {error}"
                        )))),
                    })
                    .collect()
            })
        });
        let mut results = Vec::with_capacity(outcomes.len());
        for outcome in outcomes {
            match outcome {
                Ok(Ok((last, said))) => {
                    results.push(last);
                    self.said = said.or(self.said.take());
                }
                Ok(Err(error)) => return Err(error),
                Err(panic) => std::panic::resume_unwind(panic),
            }
        }
        self.last = Value::Array(results);
        Ok(())
    }
}

/// Hangs on purpose: no interrupt and no drain ends it.
fn stay_stuck(duration: Duration) {
    thread::sleep(duration);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_come_from_the_prompt_the_file_or_the_echo() {
        let plan = |agent: &ScriptAgent, prompt: &str| match agent.plan(prompt.to_owned()) {
            Ok(Plan::Steps(steps)) => format!("{} steps", steps.len()),
            Ok(Plan::Echo(prompt)) => format!("echo {prompt}"),
            Err(error) => error.to_string(),
        };
        let echo = ScriptAgent::new(None, false).unwrap();
        assert_eq!(plan(&echo, "one two"), "echo one two");
        assert_eq!(plan(&echo, "!scripted"), "echo !scripted");
        assert_eq!(plan(&echo, r#"!script [{"say":"x"}]"#), "1 steps");
        assert_eq!(
            plan(&echo, "!script"),
            "!script: needs a JSON list of steps"
        );
        assert_eq!(
            plan(&echo, "!script {}"),
            "!script: needs a JSON list of steps"
        );

        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("script.json");
        std::fs::write(
            &path,
            r#"{"turns":[[{"delta":"a"}],[{"delta":"b"},{"delta":"c"}]]}"#,
        )
        .unwrap();
        let file = ScriptAgent::new(Some(&path), false).unwrap();
        let seen = [1, 2, 3].map(|_| plan(&file, "x y z"));
        assert_eq!(seen, ["1 steps", "2 steps", "2 steps"]);
        assert_eq!(plan(&file, "!script []"), "0 steps");
    }
}
