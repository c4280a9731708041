//! The steps of a script, and how they are read.

use std::sync::Arc;
use std::time::Duration;

use serde_json::{Map, Value};
use turnhost_protocol::limits::MAX_SCRIPT_BYTES;

/// Lists in one `parallel`, and lists in all `parallel`s of a turn: each is a thread.
const MAX_PARALLEL: usize = 64;
const MAX_THREADS: usize = 256;

/// Most deltas of one step.
const MAX_DELTAS: u64 = 10_000_000;

/// Longest wait of one step: a day.
const MAX_WAIT_MS: u64 = 86_400_000;

/// A list of steps; cheap to share between the turns that play it.
pub type Steps = Arc<[Step]>;

/// One step: SPEC §11.
#[derive(Debug, Clone, PartialEq)]
pub enum Step {
    Delta(String),
    Deltas {
        count: u64,
        text: String,
        every: Duration,
    },
    Reasoning(String),
    Sleep(Duration),
    Stuck(Duration),
    Tool {
        name: String,
        args: Value,
    },
    Parallel(Vec<Steps>),
    Say(String),
    Fail(String),
    Panic(String),
    Abort,
    Exit(i32),
}

const NAMES: &str = "delta, deltas, reasoning, sleep_ms, stuck_ms, tool, ask, parallel, say, fail, \
                     panic, abort, exit";

/// The words of `text`, each with the space behind it; joined they are `text`.
pub fn words(text: &str) -> impl Iterator<Item = &str> {
    let mut rest = text;
    std::iter::from_fn(move || {
        let is_space = |letter: char| letter.is_whitespace();
        let word = rest.find(|letter| !is_space(letter)).unwrap_or(rest.len());
        let space = rest[word..]
            .find(is_space)
            .map_or(rest.len(), |at| word + at);
        let behind = rest[space..].find(|letter| !is_space(letter));
        let (found, others) = rest.split_at(behind.map_or(rest.len(), |at| space + at));
        rest = others;
        (!found.is_empty()).then_some(found)
    })
}

/// The lists of a script file: `{"turns": [[step…]…]}`.
///
/// # Errors
/// What is wrong, and where.
pub fn parse_file(text: &str, allow_faults: bool) -> Result<Vec<Steps>, String> {
    let file: Value = serde_json::from_str(text).map_err(|error| error.to_string())?;
    let Value::Object(file) = file else {
        return Err("must be an object with `turns`".into());
    };
    if let Some(key) = file.keys().find(|key| *key != "turns") {
        return Err(format!("unknown key `{key}`, expected `turns`"));
    }
    let Some(Value::Array(turns)) = file.get("turns") else {
        return Err("`turns` must be a list of lists of steps".into());
    };
    if turns.is_empty() {
        return Err("`turns` must not be empty".into());
    }
    let mut reader = Reader {
        allow_faults,
        threads: 0,
    };
    turns
        .iter()
        .enumerate()
        .map(|(index, steps)| {
            reader.threads = 0;
            reader
                .list(steps)
                .map_err(|error| format!("turn {}: {error}", index + 1))
        })
        .collect()
}

/// The list behind `!script`.
///
/// # Errors
/// What is wrong, and in which step.
pub fn parse_list(text: &str, allow_faults: bool) -> Result<Steps, String> {
    if text.trim().is_empty() {
        return Err("needs a JSON list of steps".into());
    }
    if text.len() > MAX_SCRIPT_BYTES {
        return Err(format!(
            "has {} bytes, more than {MAX_SCRIPT_BYTES}",
            text.len()
        ));
    }
    let list = serde_json::from_str(text).map_err(|error| format!("no JSON list: {error}"))?;
    Reader {
        allow_faults,
        threads: 0,
    }
    .list(&list)
}

struct Reader {
    allow_faults: bool,
    /// Lists of `parallel` steps so far.
    threads: usize,
}

impl Reader {
    fn list(&mut self, value: &Value) -> Result<Steps, String> {
        let Value::Array(list) = value else {
            return Err("needs a JSON list of steps".into());
        };
        list.iter()
            .enumerate()
            .map(|(index, step)| {
                self.step(step)
                    .map_err(|error| format!("step {}: {error}", index + 1))
            })
            .collect()
    }

    fn step(&mut self, value: &Value) -> Result<Step, String> {
        let Value::Object(step) = value else {
            return Err(format!("must be an object with one of {NAMES}"));
        };
        let mut entries = step.iter();
        let (Some((name, value)), None) = (entries.next(), entries.next()) else {
            return Err(format!("must have exactly one key, one of {NAMES}"));
        };
        if matches!(name.as_str(), "stuck_ms" | "panic" | "abort" | "exit") && !self.allow_faults {
            return Err(format!(
                "`{name}` breaks things on purpose and needs --allow-faults"
            ));
        }
        Ok(match name.as_str() {
            "delta" => Step::Delta(text(name, value)?),
            "deltas" => {
                let fields = Fields::of(name, value, &["count", "text", "every_ms"])?;
                Step::Deltas {
                    count: fields.number("count", 1, MAX_DELTAS)?,
                    text: fields.text("text", Some("x "))?,
                    every: Duration::from_millis(fields.number("every_ms", 0, MAX_WAIT_MS)?),
                }
            }
            "reasoning" => Step::Reasoning(text(name, value)?),
            "sleep_ms" => Step::Sleep(wait(name, value)?),
            "stuck_ms" => Step::Stuck(wait(name, value)?),
            "tool" => {
                let fields = Fields::of(name, value, &["name", "args"])?;
                Step::Tool {
                    name: fields.text("name", None)?,
                    args: fields.object("args")?,
                }
            }
            // A question is the tool of its method: the same call, the same failure without one.
            "ask" => {
                let fields = Fields::of(name, value, &["method", "params", "timeout_ms"])?;
                fields.number("timeout_ms", 0, MAX_WAIT_MS)?;
                Step::Tool {
                    name: fields.text("method", None)?,
                    args: fields.object("params")?,
                }
            }
            "parallel" => {
                let Value::Array(lists) = value else {
                    return Err("`parallel` must be a list of lists of steps".into());
                };
                self.threads += lists.len();
                if lists.len() > MAX_PARALLEL || self.threads > MAX_THREADS {
                    return Err(format!(
                        "`parallel` takes at most {MAX_PARALLEL} lists, a turn {MAX_THREADS}"
                    ));
                }
                Step::Parallel(
                    lists
                        .iter()
                        .map(|list| self.list(list))
                        .collect::<Result<_, _>>()?,
                )
            }
            "say" => Step::Say(text(name, value)?),
            "fail" => Step::Fail(text(name, value)?),
            "panic" => Step::Panic(text(name, value)?),
            "abort" if *value == Value::Bool(true) => Step::Abort,
            "abort" => return Err("`abort` must be true".into()),
            "exit" => match value.as_u64() {
                Some(code @ 0..=255) => Step::Exit(code as i32),
                _ => return Err("`exit` must be an exit code between 0 and 255".into()),
            },
            other => return Err(format!("unknown step `{other}`, expected one of {NAMES}")),
        })
    }
}

fn text(name: &str, value: &Value) -> Result<String, String> {
    value
        .as_str()
        .map(str::to_owned)
        .ok_or_else(|| format!("`{name}` must be text"))
}

fn wait(name: &str, value: &Value) -> Result<Duration, String> {
    match value.as_u64() {
        Some(milliseconds @ 0..=MAX_WAIT_MS) => Ok(Duration::from_millis(milliseconds)),
        _ => Err(format!(
            "`{name}` must be a number of milliseconds, at most {MAX_WAIT_MS}"
        )),
    }
}

/// The fields of a step that is an object.
struct Fields<'a> {
    step: &'a str,
    fields: &'a Map<String, Value>,
}

impl<'a> Fields<'a> {
    fn of(step: &'a str, value: &'a Value, known: &[&str]) -> Result<Self, String> {
        let Value::Object(fields) = value else {
            return Err(format!(
                "`{step}` must be an object with {}",
                known.join(", ")
            ));
        };
        match fields.keys().find(|key| !known.contains(&key.as_str())) {
            Some(key) => Err(format!(
                "unknown field `{step}.{key}`, expected one of {}",
                known.join(", ")
            )),
            None => Ok(Self { step, fields }),
        }
    }

    fn number(&self, field: &str, default: u64, most: u64) -> Result<u64, String> {
        let Some(value) = self.fields.get(field) else {
            return Ok(default);
        };
        let step = self.step;
        value
            .as_u64()
            .filter(|number| *number <= most)
            .ok_or_else(|| format!("`{step}.{field}` must be a whole number between 0 and {most}"))
    }

    fn text(&self, field: &str, default: Option<&str>) -> Result<String, String> {
        match (self.fields.get(field), default) {
            (Some(value), _) => text(&format!("{}.{field}", self.step), value),
            (None, Some(default)) => Ok(default.to_owned()),
            (None, None) => Err(format!("`{}.{field}` is missing", self.step)),
        }
    }

    fn object(&self, field: &str) -> Result<Value, String> {
        match self.fields.get(field) {
            None => Ok(Value::Object(Map::new())),
            Some(object @ Value::Object(_)) => Ok(object.clone()),
            Some(_) => Err(format!("`{}.{field}` must be an object", self.step)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_keep_every_character() {
        let check = |text: &str, expected: &[&str]| {
            assert_eq!(words(text).collect::<Vec<_>>(), expected);
        };
        check("", &[]);
        check("one", &["one"]);
        check("hello from  here\n", &["hello ", "from  ", "here\n"]);
        check(" lead", &[" lead"]);
        check(" \t", &[" \t"]);
        check("ünï\u{2003}x", &["ünï\u{2003}", "x"]);
    }

    #[test]
    fn what_is_wrong_is_said() {
        let check = |list: &str, expected: &str| {
            assert_eq!(parse_list(list, false).unwrap_err(), expected, "{list}");
        };
        check("", "needs a JSON list of steps");
        check(" {}", "needs a JSON list of steps");
        check(
            "[",
            "no JSON list: EOF while parsing a list at line 1 column 1",
        );
        check(
            "[7]",
            &format!("step 1: must be an object with one of {NAMES}"),
        );
        check(
            r#"[{"say":"x"},{"dance":1}]"#,
            &format!("step 2: unknown step `dance`, expected one of {NAMES}"),
        );
        check(
            r#"[{"say":"x","fail":"y"}]"#,
            &format!("step 1: must have exactly one key, one of {NAMES}"),
        );
        check(r#"[{"delta":1}]"#, "step 1: `delta` must be text");
        check(
            r#"[{"deltas":{"count":-1}}]"#,
            "step 1: `deltas.count` must be a whole number between 0 and 10000000",
        );
        check(
            r#"[{"deltas":{"cuont":1}}]"#,
            "step 1: unknown field `deltas.cuont`, expected one of count, text, every_ms",
        );
        check(
            r#"[{"tool":{"args":{}}}]"#,
            "step 1: `tool.name` is missing",
        );
        check(
            r#"[{"ask":{"method":"clarify","params":[]}}]"#,
            "step 1: `ask.params` must be an object",
        );
        check(
            r#"[{"parallel":[[{"sleep_ms":1}],[{"sleep_ms":"1"}]]}]"#,
            "step 1: step 1: `sleep_ms` must be a number of milliseconds, at most 86400000",
        );
        for fault in [
            r#"{"panic":"x"}"#,
            r#"{"abort":true}"#,
            r#"{"exit":3}"#,
            r#"{"stuck_ms":1}"#,
        ] {
            let list = format!("[{fault}]");
            assert!(
                parse_list(&list, false)
                    .unwrap_err()
                    .ends_with("needs --allow-faults")
            );
            assert!(parse_list(&list, true).is_ok());
        }
        let many = format!("[{{\"parallel\":[{}]}}]", ["[]"; 65].join(","));
        check(
            &many,
            "step 1: `parallel` takes at most 64 lists, a turn 256",
        );
    }

    #[test]
    fn a_file_has_a_list_for_each_turn() {
        let check = |text: &str, expected: Result<usize, &str>| {
            let parsed = parse_file(text, false).map(|turns| turns.len());
            assert_eq!(
                parsed.as_ref().map_err(String::as_str),
                expected.as_ref().map_err(|e| *e)
            );
        };
        check(r#"{"turns":[[],[{"say":"x"}]]}"#, Ok(2));
        check(r#"{"turns":[]}"#, Err("`turns` must not be empty"));
        check(
            r#"{"turn":[]}"#,
            Err("unknown key `turn`, expected `turns`"),
        );
        check(
            r#"{"turns":[[],[{"say":1}]]}"#,
            Err("turn 2: step 1: `say` must be text"),
        );
        check("[]", Err("must be an object with `turns`"));
    }
}
