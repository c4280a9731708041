//! Lines of bounded length from a byte stream.
//!
//! Invariant: at most one line plus one read is held in memory, whatever arrives.
//! Invariant: a line that is too long costs nobody but itself; its rest is skipped unbuffered.
//! Invariant: after an error of the source, one that would block included, reading can go on
//! where it stopped; nothing that was read is lost.

use std::io::{self, Read};

use crate::limits::{LINE_BUFFER_BYTES, LOOK_BYTES};

/// One line without its line end.
#[derive(Debug, PartialEq, Eq)]
pub enum Line<'a> {
    /// A whole line.
    Whole(&'a mut [u8]),
    /// The last line of the stream, which ended before its line feed.
    Cut(&'a mut [u8]),
    /// A line that was longer than the limit.
    TooLong {
        /// Its first 64 KiB, or less when the limit is lower.
        head: &'a [u8],
        /// Its whole length in bytes.
        bytes: u64,
    },
}

/// Reads lines of at most `max_bytes` from `source`.
///
/// A carriage return before the line feed, a byte order mark at the start of the stream and lines
/// of white space alone are left out: SPEC §2.
pub struct LineReader<R> {
    source: R,
    buffer: Vec<u8>,
    /// Unread bytes are `buffer[start..end]`.
    start: usize,
    end: usize,
    /// No line feed stands before this index.
    searched: usize,
    max_bytes: usize,
    at_stream_start: bool,
    /// A line that is too long is being dropped; its head is `buffer[start..searched]`.
    skipping: Option<Skip>,
}

struct Skip {
    /// Bytes of the line that were seen so far.
    bytes: u64,
    /// Whether the last of them was a carriage return.
    carriage_return: bool,
}

const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";

impl<R: Read> LineReader<R> {
    /// A reader whose lines have at most `max_bytes` bytes, line end not counted.
    pub fn new(source: R, max_bytes: usize) -> Self {
        Self {
            source,
            buffer: vec![0; LINE_BUFFER_BYTES],
            start: 0,
            end: 0,
            searched: 0,
            max_bytes,
            at_stream_start: true,
            skipping: None,
        }
    }

    /// The source of the bytes.
    pub fn source(&self) -> &R {
        &self.source
    }

    /// The source of the bytes, to prepare it for the next read.
    pub fn source_mut(&mut self) -> &mut R {
        &mut self.source
    }

    /// Whether the next call of [`Self::next_line`] can answer without reading from the source.
    pub fn has_buffered_line(&mut self) -> bool {
        if self.skipping.is_some() {
            return false;
        }
        match memchr::memchr(b'\n', &self.buffer[self.searched..self.end]) {
            Some(found) => {
                self.searched += found;
                true
            }
            None => {
                self.searched = self.end;
                false
            }
        }
    }

    /// The next line, or `None` at the end of the stream.
    ///
    /// # Errors
    /// What the source reports, except an interruption by a signal, after which it reads again.
    pub fn next_line(&mut self) -> io::Result<Option<Line<'_>>> {
        loop {
            if self.skipping.is_some() {
                return self.skip_long_line().map(Some);
            }
            let found = loop {
                if self.has_buffered_line() {
                    break Some(self.searched);
                }
                // One more than the limit may be held: the last byte can be a carriage return.
                if self.end - self.start > self.max_bytes + 1 {
                    self.start_skipping();
                    return self.skip_long_line().map(Some);
                }
                if self.fill()? == 0 {
                    break None;
                }
            };
            let (mut from, mut to) = (self.start, found.unwrap_or(self.end));
            self.start = found.map_or(self.end, |at| at + 1);
            self.searched = self.start;
            if std::mem::take(&mut self.at_stream_start)
                && self.buffer[from..to].starts_with(BYTE_ORDER_MARK)
            {
                from += BYTE_ORDER_MARK.len();
            }
            if found.is_some() && self.buffer[from..to].ends_with(b"\r") {
                to -= 1;
            }
            if self.buffer[from..to].iter().all(u8::is_ascii_whitespace) {
                if found.is_none() {
                    return Ok(None);
                }
                continue;
            }
            if to - from > self.max_bytes {
                let head = &self.buffer[from..from + LOOK_BYTES.min(self.max_bytes)];
                return Ok(Some(Line::TooLong {
                    head,
                    bytes: (to - from) as u64,
                }));
            }
            let line = &mut self.buffer[from..to];
            return Ok(Some(if found.is_some() {
                Line::Whole(line)
            } else {
                Line::Cut(line)
            }));
        }
    }

    /// Reads once, after making room; answers the number of bytes.
    fn fill(&mut self) -> io::Result<usize> {
        if self.start == self.end {
            (self.start, self.end, self.searched) = (0, 0, 0);
            if self.buffer.len() > LINE_BUFFER_BYTES {
                // A long line went by: give its memory back.
                self.buffer = vec![0; LINE_BUFFER_BYTES];
            }
        } else if self.end == self.buffer.len() {
            if self.start > 0 {
                self.buffer.copy_within(self.start..self.end, 0);
                self.end -= self.start;
                self.searched -= self.start;
                self.start = 0;
            }
            if self.end == self.buffer.len() {
                let longest = self.max_bytes + 2;
                self.buffer.resize(
                    (self.buffer.len() * 2).min(longest.max(LINE_BUFFER_BYTES)),
                    0,
                );
            }
        }
        loop {
            match self.source.read(&mut self.buffer[self.end..]) {
                Ok(bytes) => {
                    self.end += bytes;
                    return Ok(bytes);
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Keeps the head of the line that is buffered, and counts the rest.
    fn start_skipping(&mut self) {
        if std::mem::take(&mut self.at_stream_start)
            && self.buffer[self.start..self.end].starts_with(BYTE_ORDER_MARK)
        {
            self.start += BYTE_ORDER_MARK.len();
        }
        self.skipping = Some(Skip {
            bytes: (self.end - self.start) as u64,
            carriage_return: self.buffer[self.end - 1] == b'\r',
        });
        let head = LOOK_BYTES.min(self.max_bytes).min(self.end - self.start);
        self.buffer.copy_within(self.start..self.start + head, 0);
        (self.start, self.end, self.searched) = (0, head, head);
        self.buffer.truncate(2 * LINE_BUFFER_BYTES);
        self.buffer.resize(2 * LINE_BUFFER_BYTES, 0);
        self.buffer.shrink_to_fit();
    }

    /// Drops a line up to its line feed.
    fn skip_long_line(&mut self) -> io::Result<Line<'_>> {
        let head = self.searched;
        loop {
            // Each read overwrites the one before it: only the head stays.
            let read = match self.source.read(&mut self.buffer[head..]) {
                Ok(read) => read,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(error),
            };
            let found = memchr::memchr(b'\n', &self.buffer[head..head + read]);
            let length = found.unwrap_or(read);
            if let Some(skip) = &mut self.skipping {
                skip.bytes += length as u64;
                if length > 0 {
                    skip.carriage_return = self.buffer[head + length - 1] == b'\r';
                }
            }
            if (found.is_some() || read == 0)
                && let Some(skip) = self.skipping.take()
            {
                // What follows the line stays in the buffer behind its head.
                self.start = head + (length + 1).min(read);
                self.end = head + read;
                self.searched = self.start;
                return Ok(Line::TooLong {
                    head: &self.buffer[..head],
                    bytes: skip.bytes - u64::from(found.is_some() && skip.carriage_return),
                });
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Hands out `bytes` in pieces of `piece` bytes.
    struct Pieces<'a> {
        bytes: &'a [u8],
        piece: usize,
    }

    impl Read for Pieces<'_> {
        fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
            let count = self.piece.min(self.bytes.len()).min(into.len());
            into[..count].copy_from_slice(&self.bytes[..count]);
            self.bytes = &self.bytes[count..];
            Ok(count)
        }
    }

    /// Would block before each read of `source`.
    struct Hesitant<R> {
        source: R,
        ready: bool,
    }

    impl<R: Read> Read for Hesitant<R> {
        fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
            self.ready = !self.ready;
            if self.ready {
                return Err(io::ErrorKind::WouldBlock.into());
            }
            self.source.read(into)
        }
    }

    #[test]
    fn reading_goes_on_after_a_source_that_would_block() {
        let mut input = b"\xef\xbb\xbfa\r\n".to_vec();
        input.extend_from_slice(&vec![b'x'; 400_000]);
        input.extend_from_slice(b"\r\nb\n");
        input.extend_from_slice(&vec![b'y'; 90_000]);
        for piece in [1, 7, 4096, 1_000_000] {
            let source = Pieces {
                bytes: &input,
                piece,
            };
            let mut reader = LineReader::new(
                Hesitant {
                    source,
                    ready: false,
                },
                100_000,
            );
            let mut seen = Vec::new();
            loop {
                match reader.next_line() {
                    Ok(Some(Line::Whole(line) | Line::Cut(line))) => seen.push(line.len() as u64),
                    Ok(Some(Line::TooLong { bytes, .. })) => seen.push(bytes),
                    Ok(None) => break,
                    Err(error) => assert_eq!(error.kind(), io::ErrorKind::WouldBlock),
                }
            }
            assert_eq!(seen, [1, 400_000, 1, 90_000], "pieces of {piece}");
        }
    }

    fn lines(input: &[u8], max_bytes: usize, piece: usize) -> Vec<String> {
        let mut reader = LineReader::new(
            Pieces {
                bytes: input,
                piece,
            },
            max_bytes,
        );
        let mut seen = Vec::new();
        while let Some(line) = reader.next_line().unwrap() {
            seen.push(match line {
                Line::Whole(line) => String::from_utf8_lossy(line).into_owned(),
                Line::Cut(line) => format!("cut:{}", String::from_utf8_lossy(line)),
                Line::TooLong { head, bytes } => format!("long:{}:{bytes}", head.len()),
            });
        }
        seen
    }

    #[track_caller]
    fn check(input: &[u8], max_bytes: usize, expected: &[&str]) {
        for piece in [1, 2, 3, 7, 100_000] {
            assert_eq!(
                lines(input, max_bytes, piece),
                expected,
                "pieces of {piece}"
            );
        }
    }

    #[test]
    fn lines_end_with_lf_or_crlf() {
        check(b"a\nb\r\nc\r\r\n", 10, &["a", "b", "c\r"]);
    }

    #[test]
    fn white_space_and_byte_order_mark_are_left_out() {
        check(
            b"\xef\xbb\xbfa\n\n \t\r\n\xef\xbb\xbfb\n",
            10,
            &["a", "\u{feff}b"],
        );
        check(b"\xef\xbb\xbf\na\n", 10, &["a"]);
        check(b"\n\n", 10, &[]);
    }

    #[test]
    fn the_last_line_may_lack_its_line_feed() {
        check(b"a\nbc", 10, &["a", "cut:bc"]);
        check(b"a\n  ", 10, &["a"]);
    }

    #[test]
    fn the_limit_does_not_count_the_line_end() {
        check(
            b"1234\n1234\r\n12345\n12345\r\nx\n",
            4,
            &["1234", "1234", "long:4:5", "long:4:5", "x"],
        );
        check(b"123456789", 4, &["long:4:9"]);
    }

    #[test]
    fn a_long_first_line_loses_its_byte_order_mark_too() {
        let input = [BYTE_ORDER_MARK, &[b'x'; 300_000], b"\nnext\n"].concat();
        let mut reader = LineReader::new(
            Pieces {
                bytes: &input,
                piece: 1000,
            },
            100_000,
        );
        match reader.next_line().unwrap() {
            Some(Line::TooLong {
                head,
                bytes: 300_000,
            }) => assert!(head.starts_with(b"xx")),
            other => panic!("{other:?}"),
        }
        assert_eq!(
            reader.next_line().unwrap(),
            Some(Line::Whole(&mut b"next".to_owned()))
        );
    }

    #[test]
    fn a_long_line_is_skipped_and_the_next_one_is_whole() {
        let mut input = vec![b'x'; 3_000_000];
        input.extend_from_slice(b"\nnext\n");
        input.extend_from_slice(&vec![b'y'; 200_000]);
        input.extend_from_slice(b"\r\nlast");
        for piece in [4096, 65_536, 10_000_000] {
            let mut reader = LineReader::new(
                Pieces {
                    bytes: &input,
                    piece,
                },
                150_000,
            );
            let mut seen = Vec::new();
            while let Some(line) = reader.next_line().unwrap() {
                seen.push(match line {
                    Line::Whole(line) | Line::Cut(line) => line.len() as u64,
                    Line::TooLong { head, bytes } => {
                        assert_eq!(head.len(), LOOK_BYTES);
                        bytes
                    }
                });
                assert!(reader.buffer.capacity() <= 4 * LINE_BUFFER_BYTES.max(150_002));
            }
            assert_eq!(seen, [3_000_000, 4, 200_000, 4]);
        }
    }

    #[test]
    fn memory_is_given_back_after_a_long_line() {
        let mut input = vec![b'x'; 1_000_000];
        input.extend_from_slice(b"\nshort\nlast\n");
        let mut reader = LineReader::new(
            Pieces {
                bytes: &input,
                piece: 50_000,
            },
            2_000_000,
        );
        while reader.next_line().unwrap().is_some() {}
        assert_eq!(reader.buffer.len(), LINE_BUFFER_BYTES);
    }
}
