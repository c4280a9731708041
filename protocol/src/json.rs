//! JSON text that is passed on rather than understood.
//!
//! Input is repaired once, in place, before anything parses it, so that no later step has to know
//! about lone surrogates; and raw values are made safe to stand in a line of their own.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::LazyLock;

use memchr::memmem::Finder;
use serde::Serializer;
use serde_json::value::RawValue;

/// Serializes a path that may be no UTF-8 as text that a person can read; for `serialize_with`.
///
/// # Errors
/// Those of the serializer.
pub fn lossy_path<S: Serializer>(path: &Path, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(&path.to_string_lossy())
}

/// Replaces each escaped lone surrogate inside `line` by an escaped U+FFFD: SPEC §2.
///
/// Both escapes are six bytes long, so the line keeps its length. A pair stays as it is, and so
/// does an escaped backslash before a `u`.
pub fn replace_lone_surrogates(line: &mut [u8]) {
    if memchr::memchr(b'\\', line).is_none() || !has_surrogate_escape(line) {
        return;
    }
    let mut at = 0;
    while let Some(found) = memchr::memchr(b'\\', &line[at..]) {
        let escape = at + found;
        match surrogate(&line[escape..]) {
            Some(Surrogate::High)
                if matches!(surrogate(&line[escape + 6..]), Some(Surrogate::Low)) =>
            {
                at = escape + 12;
            }
            Some(_) => {
                line[escape + 2..escape + 6].copy_from_slice(b"fffd");
                at = escape + 6;
            }
            None => at = (escape + 2).min(line.len()),
        }
    }
}

/// Whether something looks like the escape of a surrogate; much faster than looking at each escape.
fn has_surrogate_escape(line: &[u8]) -> bool {
    static LOWER: LazyLock<Finder<'_>> = LazyLock::new(|| Finder::new(b"\\ud"));
    static UPPER: LazyLock<Finder<'_>> = LazyLock::new(|| Finder::new(b"\\uD"));
    LOWER.find(line).is_some() || UPPER.find(line).is_some()
}

enum Surrogate {
    High,
    Low,
}

/// The surrogate whose escape `text` begins with.
fn surrogate(text: &[u8]) -> Option<Surrogate> {
    let [b'\\', b'u', b'd' | b'D', second, third, fourth, ..] = text else {
        return None;
    };
    if !third.is_ascii_hexdigit() || !fourth.is_ascii_hexdigit() {
        return None;
    }
    match second {
        b'8' | b'9' | b'a' | b'b' | b'A' | b'B' => Some(Surrogate::High),
        b'c'..=b'f' | b'C'..=b'F' => Some(Surrogate::Low),
        _ => None,
    }
}

/// `raw` as owned text without line breaks between its tokens.
///
/// JSON may hold a carriage return (or, from other sources than a line, a line feed) between two
/// tokens, and a raw value keeps it; written out again it would end the line for some readers.
#[must_use]
pub fn on_one_line(raw: &RawValue) -> Box<RawValue> {
    if memchr::memchr2(b'\r', b'\n', raw.get().as_bytes()).is_none() {
        return raw.to_owned();
    }
    // A break inside a string would be escaped, so each raw one stands between tokens.
    let text = raw.get().replace(['\r', '\n'], " ");
    RawValue::from_string(text).unwrap_or_else(|_| raw.to_owned())
}

/// The members of the object that `raw` is, raw. The last of equal keys wins, as everywhere.
#[must_use]
pub fn members(raw: &RawValue) -> Option<BTreeMap<Cow<'_, str>, &RawValue>> {
    serde_json::from_str(raw.get()).ok()
}

/// The bytes that `text` takes between the quotes of a JSON string.
#[must_use]
pub fn escaped_len(text: &str) -> usize {
    text.bytes()
        .map(|byte| match byte {
            b'"' | b'\\' | b'\n' | b'\r' | b'\t' | 0x08 | 0x0c => 2,
            0..0x20 => 6,
            _ => 1,
        })
        .sum()
}

/// The longest prefix of `text` that is at most `bytes` long and ends between two characters.
#[must_use]
pub fn prefix(text: &str, bytes: usize) -> &str {
    &text[..text.floor_char_boundary(bytes)]
}

/// `text` cut for use in a message, with a mark where something is missing.
#[must_use]
pub fn quoted(text: &str, bytes: usize) -> String {
    let head = prefix(text, bytes);
    if head.len() == text.len() {
        text.to_owned()
    } else {
        format!("{head}…")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lone_surrogates_are_replaced() {
        let check = |input: &str, expected: &str| {
            let mut line = input.as_bytes().to_vec();
            replace_lone_surrogates(&mut line);
            assert_eq!(String::from_utf8_lossy(&line), expected, "{input}");
        };
        check(r#"{"a":"x\ud800"}"#, r#"{"a":"x\ufffd"}"#);
        check(
            r#""\udc00\ud83d\ude00\uD83D""#,
            r#""\ufffd\ud83d\ude00\ufffd""#,
        );
        check(r#""\ud83d\ud83d\ude00""#, r#""\ufffd\ud83d\ude00""#);
        check(r#""\\ud800 \\\ud800""#, r#""\\ud800 \\\ufffd""#);
        check(r#""\ud7ff \udzzz \ud8""#, r#""\ud7ff \udzzz \ud8""#);
        check(r#""\ud800\"#, r#""\ufffd\"#);
        check("", "");
    }

    #[test]
    fn raw_values_lose_their_line_breaks() {
        let raw: Box<RawValue> = serde_json::from_str("{\"a\":\r\n[1,\r2]}").unwrap();
        assert_eq!(on_one_line(&raw).get(), "{\"a\":  [1, 2]}");
    }

    #[test]
    fn escaped_length_is_that_of_the_serializer() {
        let all: String = (0..0x100_u32)
            .filter_map(char::from_u32)
            .chain(['€', '😀'])
            .collect();
        assert_eq!(
            escaped_len(&all) + 2,
            serde_json::to_string(&all).unwrap().len()
        );
    }

    #[test]
    fn quotes_are_cut_between_characters() {
        assert_eq!(quoted("aäb", 2), "a…");
        assert_eq!(quoted("aäb", 4), "aäb");
    }
}
