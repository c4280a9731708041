//! What a frame has to look like, and how one that does not is told.
//!
//! Pure; no I/O. The fields of a pattern have to be there and to fit; further fields of the frame
//! are allowed unless the comparison is exact. A text such as `<ns>` stands for any value of its
//! kind; the table is [`Kind::ALL`].

use std::collections::BTreeMap;

use super::json::{Json, quote};

/// The values of `<id:NAME>`, as the frames so far have given them.
pub(super) type Bindings = BTreeMap<String, String>;

/// A value that a frame may have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Pattern {
    /// The field has to be missing.
    Absent,
    /// Any value of a kind.
    Of(Kind),
    /// A text with these parts in their order, anything between them and nothing around them.
    Parts(Vec<String>),
    /// A text that is named here for the first time, or the one that bears this name.
    Id(String),
    /// This very value; no object or list.
    Exactly(Json),
    List(Vec<Pattern>),
    Object(Vec<(String, Pattern)>),
}

/// A kind of values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Any,
    Bool,
    Hex32,
    Ns,
    Number,
    Path,
    Pid,
    Seq,
    Text,
}

impl Kind {
    /// Each kind with its placeholder.
    const ALL: [(&'static str, Self); 9] = [
        ("<any>", Self::Any),
        ("<bool>", Self::Bool),
        ("<hex32>", Self::Hex32),
        ("<ns>", Self::Ns),
        ("<number>", Self::Number),
        ("<path>", Self::Path),
        ("<pid>", Self::Pid),
        ("<seq>", Self::Seq),
        ("<text>", Self::Text),
    ];

    /// How a fixture writes it.
    pub(super) fn placeholder(self) -> &'static str {
        Self::ALL
            .iter()
            .find(|(_, kind)| *kind == self)
            .map_or("", |(name, _)| name)
    }

    /// Whether `value` is of this kind.
    pub(super) fn fits(self, value: &Json) -> bool {
        match (self, value) {
            (Self::Any, _) | (Self::Bool, Json::Bool(_)) | (Self::Text, Json::Text(_)) => true,
            (Self::Number, Json::Number(_)) => true,
            (Self::Ns, value) => value.whole_number().is_some(),
            (Self::Pid | Self::Seq, value) => value.whole_number().is_some_and(|number| number > 0),
            (Self::Path, Json::Text(text)) => text.starts_with('/'),
            (Self::Hex32, Json::Text(text)) => is_hex32(text),
            _ => false,
        }
    }
}

/// Whether `text` is an identity that a host has made: 32 lower-case hexadecimal digits.
pub(super) fn is_hex32(text: &str) -> bool {
    text.len() == 32
        && text
            .bytes()
            .all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

const ABSENT: &str = "<absent>";
const ID: &str = "<id:";
const LITERAL: &str = "<literal ";
const ANYTHING: &str = "<any>";

/// How `text` is written in a pattern, so that it stands for itself.
pub(super) fn literal(text: &str) -> String {
    if text.starts_with('<') || text.contains(ANYTHING) {
        format!("{LITERAL}{text}>")
    } else {
        text.to_owned()
    }
}

/// The first `<id:NAME>` in `text`: where it begins and ends, and the name.
pub(super) fn find_id(text: &str) -> Option<(std::ops::Range<usize>, &str)> {
    let begin = text.find(ID)?;
    let name = begin + ID.len();
    let end = name + text[name..].find('>')?;
    Some((begin..end + 1, &text[name..end]))
}

impl Pattern {
    /// The pattern that `json` describes, or what is wrong with it.
    pub(super) fn compile(json: Json) -> Result<Self, String> {
        Ok(match json {
            Json::Text(text) => Self::compile_text(text)?,
            Json::List(items) => Self::List(
                items
                    .into_iter()
                    .map(Self::compile)
                    .collect::<Result<_, _>>()?,
            ),
            Json::Object(fields) => {
                let compile = |(name, value)| Ok((name, Self::compile(value)?));
                Self::Object(
                    fields
                        .into_iter()
                        .map(compile)
                        .collect::<Result<_, String>>()?,
                )
            }
            scalar => Self::Exactly(scalar),
        })
    }

    fn compile_text(text: String) -> Result<Self, String> {
        if let Some((_, kind)) = Kind::ALL.iter().find(|(name, _)| *name == text) {
            return Ok(Self::Of(*kind));
        }
        if text == ABSENT {
            return Ok(Self::Absent);
        }
        if let Some(literal) = text
            .strip_prefix(LITERAL)
            .and_then(|rest| rest.strip_suffix('>'))
        {
            return Ok(Self::Exactly(Json::Text(literal.to_owned())));
        }
        if let Some(name) = text
            .strip_prefix(ID)
            .and_then(|rest| rest.strip_suffix('>'))
        {
            let good = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_' || byte == b'-';
            if name.is_empty() || !name.bytes().all(good) {
                return Err(format!("{text}: a name has letters, digits, '_' and '-'"));
            }
            return Ok(Self::Id(name.to_owned()));
        }
        if text.contains(ANYTHING) {
            return Ok(Self::Parts(
                text.split(ANYTHING).map(str::to_owned).collect(),
            ));
        }
        if text.starts_with('<') && text.ends_with('>') {
            let known: Vec<_> = Kind::ALL.iter().map(|(name, _)| *name).collect();
            return Err(format!(
                "unknown placeholder {text}; allowed: {}, {ABSENT}, <id:NAME>, <literal TEXT> for a \
                 text as it stands, or a text with {ANYTHING} in it",
                known.join(", ")
            ));
        }
        Ok(Self::Exactly(Json::Text(text)))
    }

    /// What stands under `name`.
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

    /// The one text that fits under `name`, where there is only one.
    pub(super) fn text(&self, name: &str) -> Option<&str> {
        match self.get(name)?.only_value() {
            Some(Json::Text(text)) => Some(text),
            _ => None,
        }
    }

    /// The one value that fits, where there is only one.
    pub(super) fn only_value(&self) -> Option<&Json> {
        match self {
            Self::Exactly(value) => Some(value),
            _ => None,
        }
    }

    /// The names that a frame which fits would give.
    pub(super) fn ids(&self) -> Vec<&str> {
        match self {
            Self::Id(name) => vec![name],
            Self::List(items) => items.iter().flat_map(Self::ids).collect(),
            Self::Object(fields) => fields.iter().flat_map(|(_, value)| value.ids()).collect(),
            _ => Vec::new(),
        }
    }

    /// Compares `frame` field by field; with `exact`, objects have no field that the pattern lacks.
    pub(super) fn compare(&self, frame: &Json, exact: bool, known: &Bindings) -> Comparison {
        let mut comparison = Comparison::default();
        Compare {
            exact,
            known,
            into: &mut comparison,
        }
        .value(self, Some(frame), "");
        comparison
    }

    fn describe(&self) -> String {
        match self {
            Self::Absent => "no such field".to_owned(),
            Self::Of(kind) => kind.placeholder().to_owned(),
            Self::Parts(parts) => quote(&parts.join(ANYTHING)),
            Self::Id(name) => format!("{ID}{name}>"),
            Self::Exactly(json) => json.to_string(),
            Self::List(items) => format!("a list of {}", items.len()),
            Self::Object(_) => "an object".to_owned(),
        }
    }
}

/// What a comparison has found.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Comparison {
    pub(super) mismatches: Vec<Mismatch>,
    /// Names that are given for the first time, with their values.
    pub(super) bound: Bindings,
}

/// One field that differs.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct Mismatch {
    /// Where the field stands, such as `message.params.seq`.
    pub path: String,
    /// What was expected: a value or a placeholder.
    pub expected: String,
    /// The value that came, as JSON; `None` where there was none.
    pub got: Option<String>,
}

struct Compare<'a> {
    exact: bool,
    known: &'a Bindings,
    into: &'a mut Comparison,
}

impl Compare<'_> {
    fn value(&mut self, pattern: &Pattern, got: Option<&Json>, path: &str) {
        let fits = match (pattern, got) {
            (Pattern::Absent, got) => got.is_none(),
            (_, None) => false,
            (Pattern::Of(kind), Some(value)) => kind.fits(value),
            (Pattern::Parts(parts), Some(Json::Text(text))) => has_parts(text, parts),
            (Pattern::Id(name), Some(Json::Text(text))) => self.id(name, text),
            (Pattern::Exactly(expected), Some(value)) => expected == value,
            (Pattern::List(expected), Some(Json::List(items))) if expected.len() == items.len() => {
                for (index, (pattern, item)) in expected.iter().zip(items).enumerate() {
                    self.value(pattern, Some(item), &format!("{path}[{index}]"));
                }
                true
            }
            (Pattern::Object(expected), Some(object @ Json::Object(fields))) => {
                for (name, pattern) in expected {
                    self.value(pattern, object.get(name), &below(path, name));
                }
                if self.exact {
                    for (name, value) in fields {
                        if pattern.get(name).is_none() {
                            self.differs(
                                below(path, name),
                                "no such field".to_owned(),
                                Some(value),
                            );
                        }
                    }
                }
                true
            }
            _ => false,
        };
        if !fits {
            self.differs(path.to_owned(), pattern.describe(), got);
        }
    }

    fn id(&mut self, name: &str, text: &str) -> bool {
        match self.known.get(name).or_else(|| self.into.bound.get(name)) {
            Some(known) => known == text,
            None => {
                self.into.bound.insert(name.to_owned(), text.to_owned());
                true
            }
        }
    }

    fn differs(&mut self, path: String, expected: String, got: Option<&Json>) {
        let got = got.map(Json::to_string);
        self.into.mismatches.push(Mismatch {
            path,
            expected,
            got,
        });
    }
}

/// Whether `text` consists of `parts`, with anything between them.
fn has_parts(text: &str, parts: &[String]) -> bool {
    let Some(((first, last), middle)) = parts.split_first().and_then(|(first, rest)| {
        rest.split_last()
            .map(|(last, middle)| ((first, last), middle))
    }) else {
        return false;
    };
    let Some(text) = text.strip_prefix(first.as_str()) else {
        return false;
    };
    let Some(mut text) = text.strip_suffix(last.as_str()) else {
        return false;
    };
    for part in middle {
        match text.split_once(part.as_str()) {
            Some((_, rest)) => text = rest,
            None => return false,
        }
    }
    true
}

fn below(path: &str, name: &str) -> String {
    if path.is_empty() {
        name.to_owned()
    } else {
        format!("{path}.{name}")
    }
}

#[cfg(test)]
mod tests {
    use expect_test::{Expect, expect};

    use super::*;

    fn differences(pattern: &str, frame: &str, exact: bool) -> String {
        let pattern = match Pattern::compile(Json::parse(pattern).unwrap()) {
            Ok(pattern) => pattern,
            Err(problem) => return problem,
        };
        let known = Bindings::from([("known".to_owned(), "k1".to_owned())]);
        let comparison = pattern.compare(&Json::parse(frame).unwrap(), exact, &known);
        let mut told = String::new();
        for Mismatch {
            path,
            expected,
            got,
        } in comparison.mismatches
        {
            let got = got.unwrap_or("nothing".to_owned());
            told.push_str(&format!("{path}: expected {expected}, got {got}\n"));
        }
        for (name, value) in comparison.bound {
            told.push_str(&format!("{name} is {value}\n"));
        }
        told
    }

    #[track_caller]
    fn check(pattern: &str, frame: &str, expected: Expect) {
        expected.assert_eq(&differences(pattern, frame, false));
    }

    #[test]
    fn given_fields_have_to_be_equal_and_further_ones_are_allowed() {
        check(
            r#"{"a":1,"b":{"c":"x"}}"#,
            r#"{"z":0,"b":{"d":2,"c":"x"},"a":1}"#,
            expect![""],
        );
        check(
            r#"{"a":1,"b":{"c":"x","e":[1,{"f":2}]},"g":null}"#,
            r#"{"a":2,"b":{"c":true,"e":[1,{"f":3}]}}"#,
            expect![[r#"
                a: expected 1, got 2
                b.c: expected "x", got true
                b.e[1].f: expected 2, got 3
                g: expected null, got nothing
            "#]],
        );
        check(
            r#"{"a":[1,2]}"#,
            r#"{"a":[1]}"#,
            expect![[r#"
            a: expected a list of 2, got [1]
        "#]],
        );
        check(
            r#"{"a":{}}"#,
            r#"{"a":"x"}"#,
            expect![[r#"
            a: expected an object, got "x"
        "#]],
        );
    }

    #[test]
    fn numbers_are_compared_as_they_are_written() {
        check(
            r#"{"a":1.0}"#,
            r#"{"a":1}"#,
            expect![[r#"
            a: expected 1.0, got 1
        "#]],
        );
        let digits = "9".repeat(5_000);
        check(&format!("[{digits}]"), &format!("[{digits}]"), expect![""]);
    }

    #[test]
    fn exact_means_nothing_else() {
        expect![[r#"
            b.d: expected no such field, got 2
            e: expected no such field, got 3
        "#]]
        .assert_eq(&differences(
            r#"{"b":{"c":1}}"#,
            r#"{"b":{"c":1,"d":2},"e":3}"#,
            true,
        ));
    }

    #[test]
    fn placeholders_stand_for_a_kind() {
        let check = |placeholder: &str, fitting: &[&str], others: &[&str]| {
            let pattern = Pattern::compile(Json::Text(placeholder.to_owned())).unwrap();
            let fits = |value: &str| {
                let value = Json::parse(value).unwrap();
                pattern
                    .compare(&value, false, &Bindings::new())
                    .mismatches
                    .is_empty()
            };
            assert!(
                fitting.iter().all(|value| fits(value)),
                "{placeholder} fits"
            );
            assert!(
                !others.iter().any(|value| fits(value)),
                "{placeholder} refuses"
            );
        };
        let hex = r#""0123456789abcdef0123456789abcdef""#;
        check("<any>", &["null", "1", r#""""#, "[]", "{}"], &[]);
        check("<bool>", &["true", "false"], &["null", "0"]);
        check("<hex32>", &[hex], &[r#""0123""#, &hex.to_uppercase(), "1"]);
        check(
            "<ns>",
            &["0", "18446744073709551615"],
            &["-1", "1.5", r#""1""#],
        );
        check("<number>", &["-1", "1.5", "1e999"], &[r#""1""#, "null"]);
        check(
            "<path>",
            &[r#""/""#, r#""/a b""#],
            &[r#""a""#, r#""""#, "1"],
        );
        check("<pid>", &["1"], &["0", "-1", "1.0"]);
        check("<seq>", &["1"], &["0", "null"]);
        check("<text>", &[r#""""#, r#""x""#], &["1", "null"]);
        check("<absent>", &[], &["null", "1"]);
        check(
            "invalid json: <any>",
            &[r#""invalid json: x""#, r#""invalid json: ""#],
            &[r#""invalid""#, "1"],
        );
        check(
            "<any>b<any>c",
            &[r#""bc""#, r#""abxc""#, r#""bbcc""#],
            &[r#""cb""#, r#""abcx""#, r#""c""#],
        );
        check("ab<any>ba", &[r#""abba""#], &[r#""aba""#]);
        check("<literal <any>>", &[r#""<any>""#], &[r#""x""#]);
    }

    #[test]
    fn absent_fields_are_told() {
        check(r#"{"a":"<absent>"}"#, r#"{"b":1}"#, expect![""]);
        check(
            r#"{"a":"<absent>"}"#,
            r#"{"a":null}"#,
            expect![[r#"
            a: expected no such field, got null
        "#]],
        );
        check(
            r#"{"a":"<any>"}"#,
            r#"{}"#,
            expect![[r#"
            a: expected <any>, got nothing
        "#]],
        );
    }

    #[test]
    fn an_id_is_what_it_was_first() {
        check(
            r#"["<id:new>","<id:new>","<id:known>"]"#,
            r#"["a","a","k1"]"#,
            expect![[r#"
            new is a
        "#]],
        );
        check(
            r#"["<id:new>","<id:new>","<id:known>"]"#,
            r#"["a","b","k2"]"#,
            expect![[r#"
            [1]: expected <id:new>, got "b"
            [2]: expected <id:known>, got "k2"
            new is a
        "#]],
        );
    }

    #[test]
    fn a_placeholder_that_is_none_is_refused() {
        check(
            r#"{"a":"<nanoseconds>"}"#,
            "{}",
            expect![
                "unknown placeholder <nanoseconds>; allowed: <any>, <bool>, <hex32>, <ns>, <number>, <path>, <pid>, <seq>, <text>, <absent>, <id:NAME>, <literal TEXT> for a text as it stands, or a text with <any> in it"
            ],
        );
        check(
            r#"["<id:>"]"#,
            "[]",
            expect!["<id:>: a name has letters, digits, '_' and '-'"],
        );
    }

    #[test]
    fn a_literal_stands_for_itself() {
        for text in [
            "plain",
            "<any>",
            "<x",
            "<literal a>",
            "ends with <any>",
            "a<any>b",
            "",
        ] {
            let pattern = Pattern::compile(Json::Text(literal(text))).unwrap();
            assert_eq!(
                pattern.only_value(),
                Some(&Json::Text(text.to_owned())),
                "{text}"
            );
        }
    }

    #[test]
    fn ids_are_found_in_text() {
        assert_eq!(find_id(r#"{"id":"<id:a1>"}"#), Some((7..14, "a1")));
        assert_eq!(find_id("<id:a"), None);
    }
}
