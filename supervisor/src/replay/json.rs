//! JSON as it was written: numbers keep their digits, objects the order of their fields.
//!
//! A transcript has to tell `1e3` from `1000` and give a number of 5,000 digits back, which
//! `serde_json::Value` does not. Pure; no I/O.

use std::fmt;

use serde::de::{Deserialize, Deserializer, MapAccess, Visitor};
use serde_json::value::RawValue;

/// Nesting that is taken apart; what lies deeper is kept as text. Frames need about six levels, and
/// the text of a level is scanned once for each level above it.
const MAX_DEPTH: usize = 64;

/// One JSON value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Json {
    Null,
    Bool(bool),
    /// The digits as they were written.
    Number(String),
    Text(String),
    List(Vec<Json>),
    /// Fields in their order, duplicates included.
    Object(Vec<(String, Json)>),
    /// The text of a value nested more than 64 deep.
    Deep(String),
}

impl Json {
    /// Reads one JSON text.
    pub(super) fn parse(text: &str) -> serde_json::Result<Self> {
        Self::read(serde_json::from_str(text)?, 0)
    }

    /// Reads what serde has set apart, `depth` levels down.
    fn read(raw: &RawValue, depth: usize) -> serde_json::Result<Self> {
        let text = raw.get();
        Ok(match text.as_bytes().first() {
            Some(b'{' | b'[') if depth >= MAX_DEPTH => Self::Deep(text.to_owned()),
            Some(b'{') => {
                let Fields(fields) = serde_json::from_str(text)?;
                let read =
                    |(name, raw): (String, &RawValue)| Ok((name, Self::read(raw, depth + 1)?));
                Self::Object(
                    fields
                        .into_iter()
                        .map(read)
                        .collect::<serde_json::Result<_>>()?,
                )
            }
            Some(b'[') => {
                let items: Vec<&RawValue> = serde_json::from_str(text)?;
                let read = |raw: &RawValue| Self::read(raw, depth + 1);
                Self::List(
                    items
                        .into_iter()
                        .map(read)
                        .collect::<serde_json::Result<_>>()?,
                )
            }
            Some(b'"') => Self::Text(serde_json::from_str(text)?),
            Some(b't' | b'f') => Self::Bool(serde_json::from_str(text)?),
            Some(b'n') => Self::Null,
            _ => Self::Number(text.to_owned()),
        })
    }

    /// The field `name` of an object; the last one of several.
    pub(super) fn get(&self, name: &str) -> Option<&Self> {
        match self {
            Self::Object(fields) => fields
                .iter()
                .rev()
                .find(|(field, _)| field == name)
                .map(|(_, value)| value),
            _ => None,
        }
    }

    /// What lies at the end of `path`, field by field.
    pub(super) fn at(&self, path: &[&str]) -> Option<&Self> {
        path.iter().try_fold(self, |value, name| value.get(name))
    }

    /// What lies at the end of `path`, to be changed.
    pub(super) fn at_mut(&mut self, path: &[&str]) -> Option<&mut Self> {
        path.iter().try_fold(self, |value, name| match value {
            Self::Object(fields) => fields
                .iter_mut()
                .rev()
                .find(|(field, _)| field == name)
                .map(|(_, value)| value),
            _ => None,
        })
    }

    /// The text at the end of `path`.
    pub(super) fn text_at(&self, path: &[&str]) -> Option<&str> {
        match self.at(path) {
            Some(Self::Text(text)) => Some(text),
            _ => None,
        }
    }

    /// The whole number that stands here, if it fits into 64 bits.
    pub(super) fn whole_number(&self) -> Option<u64> {
        match self {
            Self::Number(digits) => digits.parse().ok(),
            _ => None,
        }
    }
}

/// Compact JSON.
impl fmt::Display for Json {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Null => formatter.write_str("null"),
            Self::Bool(value) => write!(formatter, "{value}"),
            Self::Number(text) | Self::Deep(text) => formatter.write_str(text),
            Self::Text(text) => formatter.write_str(&quote(text)),
            Self::List(items) => {
                formatter.write_str("[")?;
                for (index, item) in items.iter().enumerate() {
                    write!(formatter, "{}{item}", if index > 0 { "," } else { "" })?;
                }
                formatter.write_str("]")
            }
            Self::Object(fields) => {
                formatter.write_str("{")?;
                for (index, (name, value)) in fields.iter().enumerate() {
                    let comma = if index > 0 { "," } else { "" };
                    write!(formatter, "{comma}{}:{value}", quote(name))?;
                }
                formatter.write_str("}")
            }
        }
    }
}

/// `text` as a JSON string.
pub(super) fn quote(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}

/// The fields of an object in their order, each value untouched.
pub(super) struct Fields<'a>(pub(super) Vec<(String, &'a RawValue)>);

impl<'de: 'a, 'a> Deserialize<'de> for Fields<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct InOrder;

        impl<'de> Visitor<'de> for InOrder {
            type Value = Fields<'de>;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let mut fields = Vec::new();
                while let Some(field) = map.next_entry()? {
                    fields.push(field);
                }
                Ok(Fields(fields))
            }
        }

        deserializer.deserialize_map(InOrder)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_is_written_as_it_was_read() {
        let check = |text: &str| assert_eq!(Json::parse(text).unwrap().to_string(), text);
        check(r#"{"b":[1,1.0,1e3,-0],"a":{"a":null,"a":true},"":"ü\n\u0000"}"#);
        check(&"9".repeat(5_000));
        check(&format!("{}1{}", "[".repeat(100_000), "]".repeat(100_000)));
        check(r#"[]"#);
        check(r#"{}"#);
    }

    #[test]
    fn the_last_of_equal_fields_counts() {
        let json = Json::parse(r#"{"a":{"b":1},"a":{"b":"2"}}"#).unwrap();
        assert_eq!(json.text_at(&["a", "b"]), Some("2"));
        assert_eq!(json.at(&["a", "c"]), None);
    }

    #[test]
    fn what_is_no_json_is_refused() {
        for text in [
            "",
            "{",
            "{\"a\":NaN}",
            "[1,]",
            "\"\\ud800\"",
            "{\"a\":\"\\ud800\"}",
            "1 2",
        ] {
            assert!(Json::parse(text).is_err(), "{text}");
        }
    }
}
