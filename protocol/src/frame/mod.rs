//! The frames between a gateway and a host: SPEC §3 and §4.
//!
//! [`input`] is read by the host, [`output`] is written by it. Both know every frame of the
//! contract, also those that only the supervisor handles.

pub mod fields;
pub mod input;
pub mod output;

use std::borrow::Cow;
use std::fmt;

use serde::{Serialize, Serializer};
use serde_json::value::RawValue;

use crate::json;

/// The id of a frame, given back exactly as it came, whatever its JSON type.
#[derive(Clone)]
pub struct RequestId(Box<RawValue>);

impl RequestId {
    /// The id whose JSON text is `raw`.
    #[must_use]
    pub fn new(raw: &RawValue) -> Self {
        Self(json::on_one_line(raw))
    }

    /// An id of our own, for a frame that came without one: 32 hex digits.
    #[must_use]
    pub fn fresh() -> Self {
        Self::text(&crate::process::random_hex32())
    }

    /// The id that is the JSON string of `text`.
    #[must_use]
    pub fn text(text: &str) -> Self {
        let quoted = serde_json::value::to_raw_value(text);
        Self(quoted.unwrap_or_else(|_| RawValue::NULL.to_owned()))
    }

    /// Its JSON text.
    #[must_use]
    pub fn as_json(&self) -> &str {
        self.0.get()
    }

    /// What tells it from others: a text without its escapes, any other value as it is written.
    fn meaning(&self) -> (bool, Cow<'_, str>) {
        match fields::text_of(&self.0) {
            Some(text) => (true, text),
            None => (false, Cow::Borrowed(self.as_json())),
        }
    }
}

/// Two ids are the same when a gateway that parses them finds the same: escapes in a text do not
/// matter.
impl PartialEq for RequestId {
    fn eq(&self, other: &Self) -> bool {
        self.as_json() == other.as_json() || self.meaning() == other.meaning()
    }
}

impl Eq for RequestId {}

impl std::hash::Hash for RequestId {
    fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
        self.meaning().hash(state);
    }
}

impl fmt::Debug for RequestId {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.as_json())
    }
}

impl Serialize for RequestId {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.0.serialize(serializer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_compared_by_their_meaning() {
        let id = |json: &str| RequestId::new(&serde_json::from_str::<Box<RawValue>>(json).unwrap());
        assert_eq!(id(r#""\u0061""#), id(r#""a""#));
        assert_ne!(id("1"), id(r#""1""#));
        assert_ne!(id("1"), id("1.0"));
        assert_eq!(
            std::collections::HashSet::from([id(r#""\u0061""#), id(r#""a""#)]).len(),
            1
        );
    }
}
