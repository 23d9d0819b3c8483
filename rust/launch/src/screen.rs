//! The launcher's own output and errors, as its ranks' lines reach them.

use std::io::{self, Write};

use anstream::{AutoStream, ColorChoice};
use anstyle::{AnsiColor, Style};

const COLOURS: [AnsiColor; 6] = [
    AnsiColor::Cyan,
    AnsiColor::Green,
    AnsiColor::Yellow,
    AnsiColor::Magenta,
    AnsiColor::Blue,
    AnsiColor::BrightRed,
];

/// Which of the two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stream {
    Out,
    Err,
}

/// The launcher's own output and errors, which receive whole lines.
pub(crate) struct Screen {
    pub(crate) prefixes: Prefixes,
    pub(crate) out: Sink,
    pub(crate) err: Sink,
}

/// One of the two streams, and what is to be written to it.
pub(crate) struct Sink {
    to: Box<dyn Write>,
    colour: bool,
    is_terminal: bool,
    bytes: Vec<u8>,
    /// A line without an end is shown at the moment.
    shows: bool,
    is_closed: bool,
}

impl Screen {
    pub(crate) fn new(prefixes: Prefixes) -> Self {
        let (out, err) = (io::stdout(), io::stderr());
        let colour = |choice| choice != ColorChoice::Never;
        let colours = (
            colour(AutoStream::choice(&out)),
            colour(AutoStream::choice(&err)),
        );
        let out_is_terminal = io::IsTerminal::is_terminal(&out);
        let err_is_terminal = io::IsTerminal::is_terminal(&err);
        Self {
            prefixes,
            out: Sink::new(Box::new(out), colours.0, out_is_terminal),
            err: Sink::new(Box::new(err), colours.1, err_is_terminal),
        }
    }

    pub(crate) fn line(&mut self, rank: u16, stream: Stream, line: &[u8]) {
        let (prefixes, sink) = self.sink(stream);
        sink.clear();
        prefixes.put(rank, sink.colour, &mut sink.bytes);
        sink.bytes.extend_from_slice(standing(line));
        sink.bytes.push(b'\n');
    }

    /// Bytes that are passed on as they are.
    pub(crate) fn plain(&mut self, stream: Stream, bytes: &[u8]) {
        self.sink(stream).1.bytes.extend_from_slice(bytes);
    }

    /// Shows a line that will be overwritten.
    pub(crate) fn show(&mut self, rank: u16, stream: Stream, line: &[u8]) {
        let (prefixes, sink) = self.sink(stream);
        if sink.is_terminal {
            sink.clear();
            prefixes.put(rank, sink.colour, &mut sink.bytes);
            sink.bytes.extend_from_slice(standing(line));
            sink.shows = true;
        }
    }

    fn sink(&mut self, stream: Stream) -> (&Prefixes, &mut Sink) {
        let (sink, other) = match stream {
            Stream::Out => (&mut self.out, &mut self.err),
            Stream::Err => (&mut self.err, &mut self.out),
        };
        // On a terminal both are one.
        if sink.is_terminal && other.is_terminal {
            other.flush();
            sink.shows |= std::mem::take(&mut other.shows);
        }
        (&self.prefixes, sink)
    }

    pub(crate) fn flush(&mut self) {
        self.out.flush();
        self.err.flush();
    }

    pub(crate) const fn is_closed(&self, stream: Stream) -> bool {
        match stream {
            Stream::Out => self.out.is_closed,
            Stream::Err => self.err.is_closed,
        }
    }
}

impl Sink {
    pub(crate) fn new(to: Box<dyn Write>, colour: bool, is_terminal: bool) -> Self {
        Self {
            to,
            colour,
            is_terminal,
            bytes: Vec::new(),
            shows: false,
            is_closed: false,
        }
    }

    /// Removes the line that is shown for a while.
    fn clear(&mut self) {
        if std::mem::take(&mut self.shows) {
            self.bytes.extend_from_slice(b"\r\x1b[K");
        }
    }

    pub(crate) fn flush(&mut self) {
        if !self.bytes.is_empty() {
            let written = self
                .to
                .write_all(&self.bytes)
                .and_then(|()| self.to.flush());
            self.is_closed |= written.is_err();
            self.bytes.clear();
        }
    }
}

/// The last version of a line that was overwritten from its beginning, once or more often.
fn standing(line: &[u8]) -> &[u8] {
    let line = line.strip_suffix(b"\r").unwrap_or(line);
    let begin = line
        .iter()
        .rposition(|&byte| byte == b'\r')
        .map_or(0, |at| at + 1);
    &line[begin..]
}

/// `[2] `, as wide for every rank, or nothing.
pub(crate) struct Prefixes {
    pub(crate) width: Option<usize>,
}

impl Prefixes {
    pub(crate) fn new(world: u16) -> Self {
        Self {
            width: Some(world.saturating_sub(1).to_string().len()),
        }
    }

    pub(crate) fn put(&self, rank: u16, colour: bool, bytes: &mut Vec<u8>) {
        let Some(width) = self.width else { return };
        let style = match colour {
            true => COLOURS[usize::from(rank) % COLOURS.len()].on_default(),
            false => Style::new(),
        };
        bytes.extend_from_slice(format!("{style}[{rank:width$}]{style:#} ").as_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prefixes_are_aligned_and_coloured_when_wanted() {
        let prefixes = Prefixes::new(11);
        let mut bytes = Vec::new();
        prefixes.put(3, false, &mut bytes);
        assert_eq!(bytes, b"[ 3] ");
        bytes.clear();
        prefixes.put(10, true, &mut bytes);
        assert!(
            bytes.starts_with(b"\x1b[") && bytes.ends_with(b"[10]\x1b[0m "),
            "{bytes:?}"
        );
    }

    #[test]
    fn a_reader_that_is_gone_closes_the_pipes() {
        struct Gone;
        impl Write for Gone {
            fn write(&mut self, _: &[u8]) -> io::Result<usize> {
                Err(io::ErrorKind::BrokenPipe.into())
            }
            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }
        let mut sink = Sink::new(Box::new(Gone), false, false);
        sink.bytes.push(b'x');
        sink.flush();
        assert!(sink.is_closed);
    }
}
