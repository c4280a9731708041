//! What was said under a `session_key`, and the settings that go with it.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use parking_lot::Mutex;
use serde_json::value::RawValue;
use turnhost_protocol::frame::fields::text_of;
use turnhost_protocol::frame::input::{Prompt, TurnStart};
use turnhost_protocol::rpc::{SessionInfo, Usage};

/// A home whose config, store and screen a session uses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Profile {
    /// The folder.
    pub home: Arc<Path>,
    /// What gateways show.
    pub name: Arc<str>,
}

impl Profile {
    /// The host's own home.
    #[must_use]
    pub fn default_of(home: &Path) -> Self {
        Self {
            home: home.into(),
            name: "default".into(),
        }
    }

    /// The profile at `home`, named after its folder.
    #[must_use]
    pub fn at(home: &Path) -> Self {
        let name = home
            .file_name()
            .unwrap_or(home.as_os_str())
            .to_string_lossy();
        Self {
            home: home.into(),
            name: name.into(),
        }
    }
}

/// What a conversation begins with where its first turn does not say.
pub struct Setup {
    /// The profile.
    pub profile: Profile,
    /// Where tools run.
    pub cwd: PathBuf,
    /// Name of the model.
    pub model: String,
}

/// A conversation. Its lock is held for copying in and out, never while an agent runs.
pub struct Conversation {
    key: Arc<str>,
    state: Mutex<Option<State>>,
}

struct State {
    profile: Profile,
    cwd: PathBuf,
    usage: Usage,
    history: Arc<Vec<Box<RawValue>>>,
    version: u64,
}

impl Conversation {
    pub(super) fn new(key: Arc<str>) -> Self {
        Self {
            key,
            state: Mutex::new(None),
        }
    }

    /// The `session_key`.
    #[must_use]
    pub fn key(&self) -> &Arc<str> {
        &self.key
    }

    /// The profile, once the first turn was prepared.
    #[must_use]
    pub fn profile(&self) -> Option<Profile> {
        self.state
            .lock()
            .as_ref()
            .map(|state| state.profile.clone())
    }

    /// Takes in what a turn brings: everything when it is the first one of this conversation;
    /// later its `history` only with `replace_history`, and its model switch.
    pub fn prepare(&self, start: &mut TurnStart, setup: impl FnOnce() -> Setup) {
        let mut state = self.state.lock();
        let is_first = state.is_none();
        let state = state.get_or_insert_with(|| {
            let Setup {
                profile,
                cwd,
                model,
            } = setup();
            State {
                profile,
                cwd: start.cwd.take().unwrap_or(cwd),
                usage: Usage {
                    model: start
                        .model_override
                        .as_deref()
                        .and_then(model_name)
                        .unwrap_or(model),
                    ..Usage::default()
                },
                history: Arc::default(),
                version: 0,
            }
        });
        if (is_first || start.replace_history)
            && let Some(history) = start.history.take()
        {
            state.history = Arc::new(history);
            state.version = start.history_version.unwrap_or(state.version);
        }
        if let Some(model) = start.pending_model_switch.as_deref().and_then(model_name) {
            state.usage.model = model;
        }
    }

    /// The messages so far; a copy that later turns do not change.
    #[must_use]
    pub fn history(&self) -> Arc<Vec<Box<RawValue>>> {
        self.state
            .lock()
            .as_ref()
            .map(|state| Arc::clone(&state.history))
            .unwrap_or_default()
    }

    /// Adds an exchange and counts it.
    pub fn add_exchange(&self, prompt: &Prompt, answer: &str) {
        #[derive(serde::Serialize)]
        struct Message<'a, T> {
            role: &'a str,
            content: T,
        }
        let question = match prompt {
            Prompt::Text(text) => raw(&Message {
                role: "user",
                content: text,
            }),
            Prompt::Parts(parts) => raw(&Message {
                role: "user",
                content: parts,
            }),
        };
        let answer = raw(&Message {
            role: "assistant",
            content: answer,
        });
        if let Some(state) = &mut *self.state.lock() {
            Arc::make_mut(&mut state.history).extend([question, answer]);
            state.version += 1;
            state.usage.calls += 1;
        }
    }

    /// What model calls cost so far.
    #[must_use]
    pub fn usage(&self) -> Usage {
        self.state
            .lock()
            .as_ref()
            .map(|state| state.usage.clone())
            .unwrap_or_default()
    }

    /// Version of the history and number of its messages.
    #[must_use]
    pub fn version_and_count(&self) -> (u64, usize) {
        self.state
            .lock()
            .as_ref()
            .map_or((0, 0), |state| (state.version, state.history.len()))
    }

    /// The session as gateways show it.
    #[must_use]
    pub fn info(&self, running: bool) -> SessionInfo {
        let state = self.state.lock();
        let (cwd, usage, profile_name) = state.as_ref().map_or_else(Default::default, |state| {
            (
                state.cwd.clone(),
                state.usage.clone(),
                state.profile.name.to_string(),
            )
        });
        SessionInfo {
            model: usage.model.clone(),
            cwd,
            running,
            title: String::new(),
            stored_session_id: self.key.to_string(),
            usage,
            personality: String::new(),
            tools: Default::default(),
            mcp_servers: Vec::new(),
            profile_name,
            version: env!("CARGO_PKG_VERSION"),
        }
    }
}

fn raw(message: &impl serde::Serialize) -> Box<RawValue> {
    // Text and raw JSON always serialize.
    serde_json::value::to_raw_value(message).unwrap_or_else(|_| RawValue::NULL.to_owned())
}

/// The model that an override names: text, `{"model": …}`, or `{"raw": "MODEL --provider …"}`.
fn model_name(setting: &RawValue) -> Option<String> {
    #[derive(serde::Deserialize)]
    struct Named {
        model: Option<String>,
        raw: Option<String>,
    }
    let named = match text_of(setting) {
        Some(text) => text.into_owned(),
        None => {
            let named: Named = serde_json::from_str(setting.get()).ok()?;
            named.model.or(named.raw)?
        }
    };
    named.split_whitespace().next().map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;
    use turnhost_protocol::frame::fields::Fields;
    use turnhost_protocol::frame::input::Input;

    fn start(fields: &str) -> TurnStart {
        let line = format!(r#"{{"type":"turn.start","sid":"s"{fields}}}"#);
        match Input::from_fields(&Fields::parse(&line, usize::MAX).unwrap()).unwrap() {
            Input::TurnStart(start) => *start,
            other => panic!("{other:?}"),
        }
    }

    fn setup() -> Setup {
        let profile = Profile::default_of(Path::new("/home/x/.turnhost"));
        Setup {
            profile,
            cwd: "/launch".into(),
            model: "script".into(),
        }
    }

    #[test]
    fn the_first_turn_seeds_and_later_ones_replace_only_when_asked() {
        let conversation = Conversation::new("k".into());
        let two = r#","history":[{"role":"user"},{"role":"assistant"}],"history_version":4"#;
        conversation.prepare(&mut start(two), setup);
        assert_eq!(conversation.version_and_count(), (4, 2));
        conversation.prepare(&mut start(r#","history":[],"history_version":9"#), setup);
        assert_eq!(conversation.version_and_count(), (4, 2));
        conversation.add_exchange(&Prompt::Text("q".into()), "a\"");
        assert_eq!(conversation.version_and_count(), (5, 4));
        assert_eq!(
            conversation.history()[3].get(),
            r#"{"role":"assistant","content":"a\""}"#
        );
        let replace = r#","history":[{}],"history_version":9,"replace_history":true"#;
        conversation.prepare(&mut start(replace), setup);
        assert_eq!(conversation.version_and_count(), (9, 1));
    }

    #[test]
    fn models_are_set_by_the_first_override_and_by_switches() {
        let conversation = Conversation::new("k".into());
        let check = |fields: &str, model: &str| {
            conversation.prepare(&mut start(fields), setup);
            assert_eq!(conversation.info(true).model, model);
        };
        check(r#","model_override":{"model":"m2","provider":"p"}"#, "m2");
        check(r#","model_override":"m3""#, "m2");
        check(
            r#","pending_model_switch":{"raw":"m4 --provider custom"}"#,
            "m4",
        );
        check("", "m4");
    }
}
