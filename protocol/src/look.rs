//! A look at a line that cannot be, or need not be, parsed.
//!
//! Finds the `type`, `sid` and `request_id` of a frame by scanning bytes: the line may be cut,
//! invalid further on, or not UTF-8. Nothing is built, nothing recurses, so depth costs nothing.

use std::borrow::Cow;

use serde_json::value::RawValue;

/// What a line shows of itself. Each is the raw JSON of the last such key at the top level.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Look<'a> {
    /// Value of `type`.
    pub kind: Option<&'a [u8]>,
    /// Value of `sid`.
    pub sid: Option<&'a [u8]>,
    /// Value of `request_id`.
    pub request_id: Option<&'a [u8]>,
}

/// Scans the first top-level object of `line` as far as it goes.
#[must_use]
pub fn look(line: &[u8]) -> Look<'_> {
    let [kind, sid, request_id] = members(line, ["type", "sid", "request_id"]);
    Look {
        kind,
        sid,
        request_id,
    }
}

/// The raw values of the members `names` of the object that `text` begins with, as far as it goes.
/// The last of equal keys wins, and keys may hold escapes.
#[must_use]
pub fn members<'a, const N: usize>(text: &'a [u8], names: [&str; N]) -> [Option<&'a [u8]>; N] {
    let mut scan = Scan { bytes: text, at: 0 };
    let mut found = [None; N];
    // Whatever was found before the text went wrong stays found.
    let _ = scan.object(&names, &mut found);
    found
}

/// The text that the raw value `raw` is, if it is one.
#[must_use]
pub fn text(raw: &[u8]) -> Option<Cow<'_, str>> {
    let inner = raw.strip_prefix(b"\"")?.strip_suffix(b"\"")?;
    if memchr::memchr(b'\\', inner).is_none() {
        return std::str::from_utf8(inner).ok().map(Cow::Borrowed);
    }
    serde_json::from_slice(raw).ok().map(Cow::Owned)
}

impl<'a> Look<'a> {
    /// Whether the `type` is the text `name`.
    #[must_use]
    pub fn is_type(&self, name: &str) -> bool {
        self.kind.and_then(text).is_some_and(|kind| kind == name)
    }

    /// The `sid`: text, or the digits of a number.
    #[must_use]
    pub fn sid(&self) -> Option<String> {
        let raw = self.sid?;
        text(raw).map(Cow::into_owned).or_else(|| {
            serde_json::from_slice::<serde_json::Number>(raw).ok()?;
            String::from_utf8(raw.to_vec()).ok()
        })
    }

    /// The `request_id`, when it is whole, valid and not `null`.
    #[must_use]
    pub fn request_id(&self) -> Option<&'a RawValue> {
        let raw: &RawValue = serde_json::from_slice(self.request_id?).ok()?;
        (raw.get() != "null").then_some(raw)
    }
}

/// A cursor over bytes; each step answers `None` where the text stops being JSON.
struct Scan<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Scan<'a> {
    fn object<const N: usize>(
        &mut self,
        names: &[&str; N],
        found: &mut [Option<&'a [u8]>; N],
    ) -> Option<()> {
        self.expect(b'{')?;
        loop {
            let key = text(self.string()?);
            self.expect(b':')?;
            self.skip_space();
            let value = self.value()?;
            if let Some(index) = names.iter().position(|name| key.as_deref() == Some(*name)) {
                found[index] = Some(value);
            }
            self.expect(b',')?;
        }
    }

    fn skip_space(&mut self) {
        while matches!(self.bytes.get(self.at), Some(b' ' | b'\t' | b'\r' | b'\n')) {
            self.at += 1;
        }
    }

    fn expect(&mut self, byte: u8) -> Option<()> {
        self.skip_space();
        (*self.bytes.get(self.at)? == byte).then(|| self.at += 1)
    }

    /// A string with its quotes.
    fn string(&mut self) -> Option<&'a [u8]> {
        self.skip_space();
        let start = self.at;
        if *self.bytes.get(start)? != b'"' {
            return None;
        }
        self.at += 1;
        loop {
            self.at += memchr::memchr2(b'"', b'\\', &self.bytes[self.at..])?;
            if self.bytes[self.at] == b'"' {
                self.at += 1;
                return Some(&self.bytes[start..self.at]);
            }
            self.at += 2;
            if self.at > self.bytes.len() {
                return None;
            }
        }
    }

    /// Any value, whole: a number at the very end of the bytes may go on and is none.
    fn value(&mut self) -> Option<&'a [u8]> {
        let start = self.at;
        match *self.bytes.get(start)? {
            b'"' => return self.string(),
            b'{' | b'[' => {
                let mut depth = 0_usize;
                loop {
                    self.at += self.bytes[self.at..]
                        .iter()
                        .position(|byte| matches!(byte, b'"' | b'{' | b'}' | b'[' | b']'))?;
                    match self.bytes[self.at] {
                        b'"' => {
                            self.string()?;
                            continue;
                        }
                        b'{' | b'[' => depth += 1,
                        _ => depth -= 1,
                    }
                    self.at += 1;
                    if depth == 0 {
                        break;
                    }
                }
            }
            _ => {
                let length = self.bytes[start..].iter().position(|byte| {
                    matches!(byte, b',' | b'}' | b']' | b' ' | b'\t' | b'\r' | b'\n')
                })?;
                self.at += length;
            }
        }
        Some(&self.bytes[start..self.at])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(line: &[u8], kind: &str, sid: &str, request_id: &str) {
        let look = look(line);
        let shown = |raw: Option<&[u8]>| String::from_utf8_lossy(raw.unwrap_or(b"-")).into_owned();
        assert_eq!(
            (
                shown(look.kind),
                look.sid().unwrap_or_default(),
                look.request_id().map(RawValue::get)
            ),
            (
                kind.to_owned(),
                sid.to_owned(),
                Some(request_id).filter(|id| !id.is_empty())
            ),
        );
    }

    #[test]
    fn finds_what_a_broken_line_shows() {
        check(
            br#"{"type":"x","sid":"s","request_id":"r""#,
            r#""x""#,
            "s",
            r#""r""#,
        );
        check(
            br#"{"type":"x","request_id":{"a":[1,"}"]},"b":"#,
            r#""x""#,
            "",
            r#"{"a":[1,"}"]}"#,
        );
        check(
            b"{\"type\":\"x\xff\xfe\",\"request_id\":\"u1\"}",
            "\"x\u{fffd}\u{fffd}\"",
            "",
            "\"u1\"",
        );
        check(br#"{"sid":17,"request_id":5,"#, "-", "17", "5");
    }

    #[test]
    fn an_unfinished_value_is_none() {
        check(br#"{"type":"turn.st"#, "-", "", "");
        check(br#"{"request_id":12"#, "-", "", "");
        check(br#"{"request_id":nul,"sid":true,"#, "-", "", "");
        check(br#"{"a":"\"#, "-", "", "");
    }

    #[test]
    fn escapes_in_keys_and_duplicates_do_not_matter() {
        check(
            br#" { "ty\u0070e" : "x" , "type":"turn.start" , "#,
            "\"turn.start\"",
            "",
            "",
        );
        assert!(look(br#"{"type":"turn\u002estart","#).is_type("turn.start"));
    }

    #[test]
    fn only_the_top_level_object_counts() {
        check(br#"{"a":{"request_id":1},"sid":"s"}"#, "-", "s", "");
        check(br#"[{"request_id":1}]"#, "-", "", "");
        check(br#"{"a":1}}{"request_id":1}"#, "-", "", "");
        check(b"", "-", "", "");
    }

    #[test]
    fn depth_costs_nothing() {
        let mut line = br#"{"request_id":"r","a":"#.to_vec();
        line.extend(std::iter::repeat_n(b'[', 1_000_000));
        check(&line, "-", "", "\"r\"");
    }
}
