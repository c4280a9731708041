//! `config.yaml` of a home: SPEC §14.
//!
//! The file may be shared with the reference: top-level keys that are not ours are left alone.
//! Inside our own sections an unknown key or a bad value is an error that names file and line.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde::de::{Deserializer, Error as _, IgnoredAny, MapAccess, SeqAccess, Visitor};

use crate::{file, limits};

/// What runs turns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AgentName {
    /// Plays steps; needs nothing.
    Script,
    /// Talks to an OpenAI-compatible server.
    Chat,
}

impl AgentName {
    /// Each name that `agent:` and `--agent` take.
    pub const NAMES: [&str; 2] = ["script", "chat"];
}

impl std::str::FromStr for AgentName {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        match name {
            "script" => Ok(Self::Script),
            "chat" => Ok(Self::Chat),
            _ => Err(format!(
                "unknown agent `{name}`, expected one of {}",
                Self::NAMES.join(", ")
            )),
        }
    }
}

/// Our part of a `config.yaml`.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct Config {
    /// `agent:` as text; a mapping is the reference's, and ignored.
    #[serde(deserialize_with = "agent")]
    pub agent: Option<AgentName>,
    /// `host:`
    #[serde(deserialize_with = "or_default")]
    pub host: HostSection,
    /// `chat:`
    #[serde(deserialize_with = "or_default")]
    pub chat: ChatSection,
    /// `supervisor:`
    #[serde(deserialize_with = "or_default")]
    pub supervisor: SupervisorSection,
}

/// Settings of the host.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct HostSection {
    /// Turns that compute at once.
    #[serde(deserialize_with = "workers")]
    pub workers: Option<usize>,
    /// Seconds between heartbeats; 0 turns them off.
    #[serde(deserialize_with = "heartbeat_secs")]
    pub heartbeat_secs: Option<f64>,
    /// Longest line, in bytes.
    #[serde(deserialize_with = "max_frame_bytes")]
    pub max_frame_bytes: Option<usize>,
    /// Turns that wait for a worker.
    #[serde(deserialize_with = "max_queued_turns")]
    pub max_queued_turns: Option<usize>,
    /// Which log records are kept, as `TURNHOST_LOG`.
    pub log: Option<String>,
}

/// Settings of the chat agent.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[allow(missing_docs, reason = "the names are those of SPEC §11")]
pub struct ChatSection {
    pub base_url: Option<String>,
    pub api_key_env: Option<String>,
    pub model: Option<String>,
    pub system_prompt: Option<String>,
    #[serde(deserialize_with = "whole_number")]
    pub max_tool_rounds: Option<u32>,
    #[serde(deserialize_with = "whole_number")]
    pub connect_timeout_secs: Option<u32>,
    #[serde(deserialize_with = "whole_number")]
    pub idle_timeout_secs: Option<u32>,
    #[serde(deserialize_with = "whole_number")]
    pub total_timeout_secs: Option<u32>,
}

/// Settings of the supervisor.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SupervisorSection {
    /// Further variables that the host gets.
    #[serde(deserialize_with = "names")]
    pub env_pass: Vec<String>,
}

/// A `config.yaml` that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// It is there but cannot be read.
    #[error("cannot read {}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// It says something that it must not.
    #[error("{}:{line}: {message}", path.display())]
    Invalid {
        /// The file.
        path: PathBuf,
        /// The line, counted from 1.
        line: u64,
        /// What is wrong, and what is allowed.
        message: String,
    },
}

impl Config {
    /// Reads `path`; a file that is missing or empty says nothing.
    ///
    /// # Errors
    /// It cannot be read, is not YAML, or our part of it is wrong.
    pub fn read(path: &Path) -> Result<Self, ConfigError> {
        let text = match file::read_text(path, limits::MAX_CONFIG_BYTES) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Self::default()),
            Err(source) => {
                return Err(ConfigError::Read {
                    path: path.to_owned(),
                    source,
                });
            }
        };
        Self::parse(&text).map_err(|(line, message)| ConfigError::Invalid {
            path: path.to_owned(),
            line,
            message,
        })
    }

    fn parse(text: &str) -> Result<Self, (u64, String)> {
        let config: Result<Option<Self>, _> = serde_saphyr::from_str(text);
        config.map(Option::unwrap_or_default).map_err(|error| {
            let line = error.location().map_or(1, |location| location.line());
            // The message itself is the first line; a picture of the place follows it.
            let shown = error.without_snippet().to_string();
            let message = shown.lines().next().unwrap_or_default();
            let message = message
                .rsplit_once(" at line ")
                .map_or(message, |(message, _)| message);
            (line, message.to_owned())
        })
    }
}

/// Checks the number of workers.
///
/// # Errors
/// What is allowed.
pub fn check_workers(workers: usize) -> Result<usize, String> {
    let (least, most) = (limits::MIN_WORKERS, limits::MAX_WORKERS);
    in_range("workers", workers, least, most)
}

/// Checks the longest line, in bytes.
///
/// # Errors
/// What is allowed.
pub fn check_max_frame_bytes(bytes: usize) -> Result<usize, String> {
    let (least, most) = (limits::MIN_MAX_FRAME_BYTES, limits::MAX_MAX_FRAME_BYTES);
    in_range("max_frame_bytes", bytes, least, most)
}

/// Checks the number of turns that may wait.
///
/// # Errors
/// What is allowed.
pub fn check_max_queued_turns(turns: usize) -> Result<usize, String> {
    in_range("max_queued_turns", turns, 0, limits::MAX_MAX_QUEUED_TURNS)
}

/// Checks the seconds between heartbeats.
///
/// # Errors
/// What is allowed.
pub fn check_heartbeat_secs(seconds: f64) -> Result<f64, String> {
    let most = limits::MAX_HEARTBEAT_SECS;
    let least = limits::MIN_HEARTBEAT_SECS;
    if seconds == 0.0 || (least..=most as f64).contains(&seconds) {
        Ok(seconds)
    } else {
        Err(format!(
            "heartbeat_secs must be 0 (off) or between {least} and {most}, not {seconds}"
        ))
    }
}

fn in_range(name: &str, value: usize, least: usize, most: usize) -> Result<usize, String> {
    if (least..=most).contains(&value) {
        Ok(value)
    } else {
        Err(format!(
            "{name} must be between {least} and {most}, not {value}"
        ))
    }
}

fn workers<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<usize>, D::Error> {
    checked(
        deserializer,
        "workers must be a whole number",
        check_workers,
    )
}

fn max_frame_bytes<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<usize>, D::Error> {
    checked(
        deserializer,
        "max_frame_bytes must be a number of bytes",
        check_max_frame_bytes,
    )
}

fn max_queued_turns<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<usize>, D::Error> {
    checked(
        deserializer,
        "max_queued_turns must be a whole number",
        check_max_queued_turns,
    )
}

fn heartbeat_secs<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<f64>, D::Error> {
    checked(
        deserializer,
        "heartbeat_secs must be a number of seconds",
        check_heartbeat_secs,
    )
}

fn whole_number<'de, D, T>(deserializer: D) -> Result<Option<T>, D::Error>
where
    D: Deserializer<'de>,
    T: Deserialize<'de>,
{
    checked(deserializer, "it must be a whole number, 0 or more", Ok)
}

fn names<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<String>, D::Error> {
    checked(deserializer, "it must be a list of names of variables", Ok)
        .map(Option::unwrap_or_default)
}

/// A section that is there but empty says nothing.
fn or_default<'de, D, T>(deserializer: D) -> Result<T, D::Error>
where
    D: Deserializer<'de>,
    T: Deserialize<'de> + Default,
{
    Option::<T>::deserialize(deserializer).map(Option::unwrap_or_default)
}

fn checked<'de, D: Deserializer<'de>, T: Deserialize<'de>>(
    deserializer: D,
    expected: &str,
    check: impl Fn(T) -> Result<T, String>,
) -> Result<Option<T>, D::Error> {
    let value = Option::<T>::deserialize(deserializer).map_err(|_| D::Error::custom(expected))?;
    value.map(check).transpose().map_err(D::Error::custom)
}

fn agent<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<AgentName>, D::Error> {
    struct Agent;

    impl<'de> Visitor<'de> for Agent {
        type Value = Option<AgentName>;

        fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
            write!(formatter, "one of {}", AgentName::NAMES.join(", "))
        }

        fn visit_str<E: serde::de::Error>(self, name: &str) -> Result<Self::Value, E> {
            name.parse().map(Some).map_err(E::custom)
        }

        fn visit_unit<E>(self) -> Result<Self::Value, E> {
            Ok(None)
        }

        fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
            while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
            Ok(None)
        }

        fn visit_seq<A: SeqAccess<'de>>(self, _: A) -> Result<Self::Value, A::Error> {
            Err(A::Error::invalid_type(serde::de::Unexpected::Seq, &self))
        }
    }

    deserializer.deserialize_any(Agent)
}

#[cfg(test)]
mod tests {
    use super::*;
    use expect_test::{Expect, expect};

    fn check(text: &str, expected: Expect) {
        let shown = match Config::parse(text) {
            Ok(config) => format!("{:?} {:?}", config.agent, config.host.workers),
            Err((line, message)) => format!("{line}: {message}"),
        };
        expected.assert_eq(&shown);
    }

    #[test]
    fn our_sections_are_strict_and_the_rest_is_left_alone() {
        check("", expect!["None None"]);
        check(
            "agent: script\nhost:\n  workers: 3\n",
            expect!["Some(Script) Some(3)"],
        );
        check(
            "agent:\n  max_turns: 90\nterminal: {backend: local}\n",
            expect!["None None"],
        );
        check(
            "model:\n  default: m\n  base_url: x\nmcp_servers: {}\n",
            expect!["None None"],
        );
        check("host:\n", expect!["None None"]);
        check(
            "# c\nhost:\n  wokers: 3\n",
            expect![
                "3: unknown field `wokers`, expected one of workers, heartbeat_secs, max_frame_bytes, max_queued_turns, log"
            ],
        );
        check(
            "\nhost:\n  workers: 1\n",
            expect!["3: workers must be between 2 and 1024, not 1"],
        );
        check(
            "host:\n  workers: many\n",
            expect!["2: workers must be a whole number"],
        );
        check(
            "host:\n  heartbeat_secs: -1\n",
            expect!["2: heartbeat_secs must be 0 (off) or between 0.01 and 86400, not -1"],
        );
        check(
            "\n\nagent: skript\n",
            expect!["3: unknown agent `skript`, expected one of script, chat"],
        );
        check(
            "chat:\n  modell: x\n",
            expect![
                "2: unknown field `modell`, expected one of base_url, api_key_env, model, system_prompt, max_tool_rounds, connect_timeout_secs, idle_timeout_secs, total_timeout_secs"
            ],
        );
        check(
            "supervisor:\n  env_pass: X\n",
            expect!["2: it must be a list of names of variables"],
        );
        check(
            "a: b: c\n",
            expect!["1: mapping values are not allowed in this context"],
        );
    }

    #[test]
    fn a_missing_file_says_nothing_and_an_unreadable_one_is_named() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(
            Config::read(&folder.path().join("x")).unwrap(),
            Config::default()
        );
        let error = Config::read(folder.path()).unwrap_err().to_string();
        assert!(
            error.starts_with(&format!("cannot read {}: ", folder.path().display())),
            "{error}"
        );
    }
}
