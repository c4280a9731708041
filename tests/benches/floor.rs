//! The floor of the benchmarks: what the pipes and the system cost when nothing is done.
//!
//! Writes one line at its start, as a host says hello, then gives each line back. With `--bytes` it
//! moves bytes without looking for lines. What belongs together goes out in one write, as soon as
//! no more input is there at once.

use std::io::{self, BufRead, BufReader, BufWriter, Read, Write};

const BUFFER_BYTES: usize = 64 * 1024;

fn main() -> io::Result<()> {
    let mut input = io::stdin().lock();
    let mut output = io::stdout().lock();
    output.write_all(b"{\"type\":\"hello\"}\n")?;
    output.flush()?;
    if std::env::args().any(|argument| argument == "--bytes") {
        move_bytes(&mut input, &mut output)
    } else {
        echo_lines(input, output)
    }
}

fn move_bytes(input: &mut impl Read, output: &mut impl Write) -> io::Result<()> {
    let mut buffer = vec![0; BUFFER_BYTES];
    loop {
        let count = input.read(&mut buffer)?;
        if count == 0 {
            return Ok(());
        }
        output.write_all(&buffer[..count])?;
        output.flush()?;
    }
}

fn echo_lines(input: impl Read, output: impl Write) -> io::Result<()> {
    let mut input = BufReader::with_capacity(BUFFER_BYTES, input);
    let mut output = BufWriter::with_capacity(BUFFER_BYTES, output);
    let mut line = Vec::new();
    loop {
        if input.buffer().is_empty() {
            output.flush()?;
        }
        line.clear();
        if input.read_until(b'\n', &mut line)? == 0 {
            return Ok(());
        }
        output.write_all(&line)?;
    }
}
