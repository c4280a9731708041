//! The known fields of a frame, found in one pass over its line.
//!
//! Values stay raw until a frame asks for them, so unknown fields, depth and number size cost
//! nothing; only `history` is split into its messages on the way, because it is what is long.
//! The last of several equal keys wins, keys may hold escapes, and `null` means absent: SPEC §2.

use std::borrow::Cow;
use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::value::RawValue;

use super::RequestId;
use crate::{json, limits};

macro_rules! fields {
    ($($variant:ident $name:literal),* $(,)?) => {
        /// A field that some frame has.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        #[allow(missing_docs, reason = "the names are those of SPEC §3")]
        pub enum Field { $($variant),* }

        impl Field {
            const COUNT: usize = [$($name),*].len();

            /// The name on the wire.
            #[must_use]
            pub fn name(self) -> &'static str {
                match self { $(Self::$variant => $name),* }
            }

            fn from_name(name: &str) -> Option<Self> {
                match name { $($name => Some(Self::$variant),)* _ => None }
            }
        }
    };
}

fields! {
    Type "type",
    Sid "sid",
    RequestId "request_id",
    ActiveSessionLease "active_session_lease",
    AttachedImages "attached_images",
    AuthUserId "auth_user_id",
    BootId "boot_id",
    Cols "cols",
    Command "command",
    ContextCwdIsLaunchArtifact "context_cwd_is_launch_artifact",
    Cwd "cwd",
    DisplayKind "display_kind",
    DisplayMetadata "display_metadata",
    History "history",
    HistoryVersion "history_version",
    ModelOverride "model_override",
    Params "params",
    PendingModelSwitch "pending_model_switch",
    ProfileHome "profile_home",
    Prompt "prompt",
    ProtocolVersion "protocol_version",
    QueuedPromptGeneration "queued_prompt_generation",
    ReasoningConfigOverride "reasoning_config_override",
    ReplaceHistory "replace_history",
    RouteName "route_name",
    ServiceTierOverride "service_tier_override",
    SessionKey "session_key",
    Source "source",
    Text "text",
    TruncateBefore "truncate_before",
    TurnId "turn_id",
    WaitMs "wait_ms",
}

/// A field that is not what the frame needs.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{field} must be {expected}")]
pub struct InvalidField {
    /// Name of the field, with its place inside where it is nested.
    pub field: Cow<'static, str>,
    /// What the field may be, as the end of a sentence.
    pub expected: &'static str,
}

impl InvalidField {
    /// An error about `field`.
    #[must_use]
    pub fn new(field: impl Into<Cow<'static, str>>, expected: &'static str) -> Self {
        Self {
            field: field.into(),
            expected,
        }
    }
}

/// The known fields of one frame, borrowed from its line.
#[derive(Debug)]
pub struct Fields<'a> {
    values: [Option<&'a RawValue>; Field::COUNT],
    history: Option<History<'a>>,
    max_frame_bytes: usize,
}

#[derive(Debug)]
enum History<'a> {
    Messages(Vec<&'a RawValue>),
    NoList,
}

impl<'a> Fields<'a> {
    /// The fields of the JSON object that `line` is. What answers give back may be so long that
    /// a frame of `max_frame_bytes` still holds it.
    ///
    /// # Errors
    /// What is wrong with the JSON. A line that is JSON but no object gives
    /// [`NotAFrame::NoObject`].
    pub fn parse(line: &'a str, max_frame_bytes: usize) -> Result<Self, NotAFrame> {
        let is_object = line.trim_ascii_start().starts_with('{');
        if !is_object {
            // Whether it is JSON at all decides between the two errors.
            return match serde_json::from_str::<IgnoredAny>(line) {
                Ok(_) => Err(NotAFrame::NoObject),
                Err(error) => Err(NotAFrame::NoJson(error.to_string())),
            };
        }
        let mut json = serde_json::Deserializer::from_str(line);
        json.deserialize_map(FieldsVisitor { max_frame_bytes })
            .and_then(|fields| json.end().map(|()| fields))
            .map_err(|error| NotAFrame::NoJson(error.to_string()))
    }

    /// The raw value of `field`; `null` is absent.
    #[must_use]
    pub fn raw(&self, field: Field) -> Option<&'a RawValue> {
        self.values[field as usize].filter(|value| value.get() != "null")
    }

    /// The `type` as text: a number gives its digits, anything else that is no text its JSON.
    #[must_use]
    pub fn kind(&self) -> Cow<'a, str> {
        match self.raw(Field::Type) {
            None => Cow::Borrowed(""),
            Some(raw) => text_of(raw).unwrap_or(Cow::Borrowed(raw.get())),
        }
    }

    /// The `request_id`, or one of our own where there is none.
    ///
    /// # Errors
    /// An id that no answer could give back: [`limits::max_request_id_bytes`].
    pub fn request_id(&self) -> Result<RequestId, InvalidField> {
        let max_bytes = limits::max_request_id_bytes(self.max_frame_bytes);
        match self.raw(Field::RequestId) {
            None => Ok(RequestId::fresh()),
            Some(raw) if raw.get().len() <= max_bytes => Ok(RequestId::new(raw)),
            Some(_) => Err(InvalidField::new(
                "request_id",
                "short enough to be given back",
            )),
        }
    }

    /// Text, borrowed where it holds no escape.
    ///
    /// # Errors
    /// A value of another type.
    pub fn text(&self, field: Field) -> Result<Option<Cow<'a, str>>, InvalidField> {
        self.typed(field, "text", text_of)
    }

    /// A name: text of bounded length, or a number, which is taken as its digits.
    ///
    /// # Errors
    /// A value of another type, or a longer one: [`limits::max_name_bytes`].
    pub fn name(&self, field: Field) -> Result<Option<String>, InvalidField> {
        let name = self.typed(field, "text", |raw| {
            let is_number = raw
                .get()
                .starts_with(|first: char| first == '-' || first.is_ascii_digit());
            if is_number {
                Some(Cow::Borrowed(raw.get()))
            } else {
                text_of(raw)
            }
        })?;
        self.short(field, name)
    }

    /// Text of bounded length.
    ///
    /// # Errors
    /// A value of another type, or a longer one: [`limits::max_name_bytes`].
    pub fn short_text(&self, field: Field) -> Result<Option<String>, InvalidField> {
        let text = self.text(field)?;
        self.short(field, text)
    }

    fn short(
        &self,
        field: Field,
        text: Option<Cow<'_, str>>,
    ) -> Result<Option<String>, InvalidField> {
        let max_bytes = limits::max_name_bytes(self.max_frame_bytes);
        if text
            .as_ref()
            .is_some_and(|text| json::escaped_len(text) > max_bytes)
        {
            return Err(InvalidField::new(
                field.name(),
                "short enough to stand in each frame",
            ));
        }
        Ok(text.map(Cow::into_owned))
    }

    /// A whole number.
    ///
    /// # Errors
    /// A value of another type, or one that does not fit.
    pub fn integer<T: serde::de::DeserializeOwned>(
        &self,
        field: Field,
        expected: &'static str,
    ) -> Result<Option<T>, InvalidField> {
        self.typed(field, expected, |raw| serde_json::from_str(raw.get()).ok())
    }

    /// True or false; absent is false.
    ///
    /// # Errors
    /// A value of another type.
    pub fn flag(&self, field: Field) -> Result<bool, InvalidField> {
        self.typed(field, "true or false", |raw| {
            serde_json::from_str(raw.get()).ok()
        })
        .map(Option::unwrap_or_default)
    }

    /// A list of texts; absent is empty.
    ///
    /// # Errors
    /// A value of another type.
    pub fn texts(&self, field: Field) -> Result<Vec<String>, InvalidField> {
        self.typed(field, "a list of texts", |raw| {
            serde_json::from_str(raw.get()).ok()
        })
        .map(Option::unwrap_or_default)
    }

    /// An object, passed on untouched.
    ///
    /// # Errors
    /// A value of another type.
    pub fn object(&self, field: Field) -> Result<Option<Box<RawValue>>, InvalidField> {
        self.typed(field, "an object", |raw| {
            is_object(raw).then(|| json::on_one_line(raw))
        })
    }

    /// Text or an object, passed on untouched.
    ///
    /// # Errors
    /// A value of another type.
    pub fn text_or_object(&self, field: Field) -> Result<Option<Box<RawValue>>, InvalidField> {
        self.typed(field, "text or an object", |raw| {
            (is_object(raw) || raw.get().starts_with('"')).then(|| json::on_one_line(raw))
        })
    }

    /// The messages of `history`, untouched.
    ///
    /// # Errors
    /// No list, or a message that is no object.
    pub fn history(&self) -> Result<Option<Vec<Box<RawValue>>>, InvalidField> {
        const EXPECTED: &str = "a list of message objects";
        match &self.history {
            None => Ok(None),
            Some(History::NoList) => Err(InvalidField::new("history", EXPECTED)),
            Some(History::Messages(messages)) => messages
                .iter()
                .enumerate()
                .map(|(index, raw)| {
                    if is_object(raw) {
                        Ok(json::on_one_line(raw))
                    } else {
                        Err(InvalidField::new(
                            format!("history[{index}]"),
                            "a message object",
                        ))
                    }
                })
                .collect::<Result<_, _>>()
                .map(Some),
        }
    }

    fn typed<T>(
        &self,
        field: Field,
        expected: &'static str,
        read: impl FnOnce(&'a RawValue) -> Option<T>,
    ) -> Result<Option<T>, InvalidField> {
        match self.raw(field) {
            None => Ok(None),
            Some(raw) => match read(raw) {
                Some(value) => Ok(Some(value)),
                None => Err(InvalidField::new(field.name(), expected)),
            },
        }
    }
}

/// Why a line is no frame.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotAFrame {
    /// It is not JSON, and what the parser said.
    #[error("invalid json: {0}")]
    NoJson(String),
    /// It is JSON of another type.
    #[error("frame must be an object")]
    NoObject,
}

/// The text that `raw` is, if it is one.
#[must_use]
pub fn text_of(raw: &RawValue) -> Option<Cow<'_, str>> {
    let inner = raw.get().strip_prefix('"')?.strip_suffix('"')?;
    if memchr::memchr(b'\\', inner.as_bytes()).is_none() {
        return Some(Cow::Borrowed(inner));
    }
    serde_json::from_str(raw.get()).ok().map(Cow::Owned)
}

fn is_object(raw: &RawValue) -> bool {
    raw.get().starts_with('{')
}

struct FieldsVisitor {
    max_frame_bytes: usize,
}

impl<'de> Visitor<'de> for FieldsVisitor {
    type Value = Fields<'de>;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut fields = Fields {
            values: [None; Field::COUNT],
            history: None,
            max_frame_bytes: self.max_frame_bytes,
        };
        while let Some(key) = map.next_key_seed(Key)? {
            match key {
                None => {
                    map.next_value::<IgnoredAny>()?;
                }
                Some(Field::History) => fields.history = map.next_value_seed(HistorySeed)?,
                Some(field) => fields.values[field as usize] = Some(map.next_value()?),
            }
        }
        Ok(fields)
    }
}

/// Reads a key without keeping its text.
struct Key;

impl<'de> DeserializeSeed<'de> for Key {
    type Value = Option<Field>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_identifier(self)
    }
}

impl Visitor<'_> for Key {
    type Value = Option<Field>;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("a key")
    }

    fn visit_str<E>(self, name: &str) -> Result<Self::Value, E> {
        Ok(Field::from_name(name))
    }
}

/// Splits the history while it is scanned, so that its bytes are looked at once.
struct HistorySeed;

impl<'de> DeserializeSeed<'de> for HistorySeed {
    type Value = Option<History<'de>>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for HistorySeed {
    type Value = Option<History<'de>>;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("a value")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Self::Value, A::Error> {
        let mut messages = Vec::new();
        while let Some(message) = list.next_element::<&RawValue>()? {
            messages.push(message);
        }
        Ok(Some(History::Messages(messages)))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
        Ok(Some(History::NoList))
    }

    fn visit_unit<E>(self) -> Result<Self::Value, E> {
        Ok(None)
    }

    fn visit_bool<E>(self, _: bool) -> Result<Self::Value, E> {
        Ok(Some(History::NoList))
    }

    fn visit_i64<E>(self, _: i64) -> Result<Self::Value, E> {
        Ok(Some(History::NoList))
    }

    fn visit_u64<E>(self, _: u64) -> Result<Self::Value, E> {
        Ok(Some(History::NoList))
    }

    fn visit_f64<E>(self, _: f64) -> Result<Self::Value, E> {
        Ok(Some(History::NoList))
    }

    fn visit_str<E>(self, _: &str) -> Result<Self::Value, E> {
        Ok(Some(History::NoList))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Result<Fields<'_>, NotAFrame> {
        Fields::parse(line, limits::MAX_FRAME_BYTES)
    }

    #[test]
    fn the_last_of_equal_keys_wins_and_null_is_absent() {
        let fields = parse(r#"{"sid":"a","s\u0069d":"b","cols":1,"cols":null}"#).unwrap();
        assert_eq!(fields.name(Field::Sid).unwrap().as_deref(), Some("b"));
        assert_eq!(
            fields.integer::<u32>(Field::Cols, "a number").unwrap(),
            None
        );
    }

    #[test]
    fn numbers_are_taken_as_digits_where_text_names_something() {
        let fields = parse(r#"{"type":7,"sid":-17.50,"session_key":true}"#).unwrap();
        assert_eq!(fields.kind(), "7");
        assert_eq!(fields.name(Field::Sid).unwrap().as_deref(), Some("-17.50"));
        let error = fields.name(Field::SessionKey).unwrap_err();
        assert_eq!(error.to_string(), "session_key must be text");
    }

    #[test]
    fn history_is_split_and_untouched() {
        let line = r#"{"history":[{"n":123456789012345678901234567890,"f":1.10},{}]}"#;
        let history = parse(line).unwrap().history().unwrap().unwrap();
        assert_eq!(
            history[0].get(),
            r#"{"n":123456789012345678901234567890,"f":1.10}"#
        );
        for (value, message) in [
            ("{}", "history must be a list of message objects"),
            ("1.5", "history must be a list of message objects"),
            (r#""x""#, "history must be a list of message objects"),
            ("[{},7]", "history[1] must be a message object"),
        ] {
            let line = format!(r#"{{"history":{value}}}"#);
            let error = parse(&line).unwrap().history().unwrap_err();
            assert_eq!(error.to_string(), message);
        }
        assert!(
            parse(r#"{"history":null}"#)
                .unwrap()
                .history()
                .unwrap()
                .is_none()
        );
    }

    #[test]
    fn depth_and_digits_cost_nothing() {
        let deep = "[".repeat(100_000) + &"]".repeat(100_000);
        let digits = "9".repeat(5_000);
        let line = format!(r#"{{"x":{deep},"history":[{deep}],"request_id":{digits}}}"#);
        let fields = parse(&line).unwrap();
        assert_eq!(fields.request_id().unwrap().as_json(), digits);
        assert!(fields.history().is_err());
    }

    #[test]
    fn what_is_no_frame_is_named() {
        let check = |line: &str, expected: &str| {
            assert_eq!(parse(line).unwrap_err().to_string(), expected);
        };
        check("[1,2]", "frame must be an object");
        check(" null", "frame must be an object");
        check(
            "{}{}",
            "invalid json: trailing characters at line 1 column 3",
        );
        check(
            "{not json",
            "invalid json: key must be a string at line 1 column 2",
        );
        check(
            r#"{"a":NaN}"#,
            "invalid json: expected value at line 1 column 6",
        );
    }
}
