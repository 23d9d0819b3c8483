//! The output of the ranks.
//!
//! With a prefix, one thread reads the pipes of all ranks and writes whole lines, each after the number of its
//! rank. A part of a line waits for the rest of it, so lines of different ranks never mix. On a terminal, a line that a
//! rank keeps overwriting (a progress bar) is shown as it stands, below the others.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, ErrorKind, PipeWriter, Read};
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Sender;
use std::thread;

use rustix::event::{PollFd, PollFlags, poll};

use crate::options::Output;
use crate::order;
use crate::screen::{Prefixes, Screen, Stream};
use crate::signals::Event;

/// A longer line is cut in pieces of this size.
const LONGEST_LINE: usize = 1 << 20;

/// Where the ranks' output goes, while they are being started.
pub(crate) struct Outputs {
    pub(crate) ways: Ways,
    prefixes: Prefixes,
    sources: Vec<Source>,
    is_writing: Arc<AtomicBool>,
}

impl Outputs {
    pub(crate) fn new(output: Output, world: u16) -> io::Result<Self> {
        if let Output::Folder(folder) = &output {
            fs::create_dir_all(folder)?;
        }
        Ok(Self {
            ways: Ways {
                output,
                pipes: BTreeMap::new(),
            },
            prefixes: Prefixes::new(world),
            sources: Vec::new(),
            is_writing: Arc::default(),
        })
    }

    /// Of the launchers of several hosts, whose lines have a prefix already if they are to have one.
    pub(crate) fn of_hosts(output: &Output) -> Self {
        Self {
            ways: Ways {
                output: output.clone(),
                pipes: BTreeMap::new(),
            },
            prefixes: Prefixes { width: None },
            sources: Vec::new(),
            is_writing: Arc::default(),
        }
    }

    /// True while something that the ranks printed waits for a reader.
    pub(crate) fn is_writing(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.is_writing)
    }

    /// Prepares the output of `rank`, which `command` will start for the first time.
    pub(crate) fn prepare(&mut self, rank: u16, command: &mut Command) -> io::Result<()> {
        match &self.ways.output {
            Output::Plain => {}
            Output::Prefix => {
                let ((out, to_out), (err, to_err)) = (io::pipe()?, io::pipe()?);
                self.add(rank, out.into(), Stream::Out, None);
                self.add(rank, err.into(), Stream::Err, None);
                self.ways.pipes.insert(rank, [to_out, to_err]);
            }
            Output::Folder(folder) => {
                for file in files(folder, rank) {
                    File::create(file)?;
                }
            }
        }
        self.ways.lead(rank, command)
    }

    /// Takes over the pipes of what reaches `host`. Whatever comes before its launcher has its order is the host's own, and
    /// goes to the errors.
    pub(crate) fn adopt_host(&mut self, host: u16, child: &mut Child) {
        if let Some(out) = child.stdout.take() {
            self.add(host, out.into(), Stream::Out, Some(host));
        }
        if let Some(err) = child.stderr.take() {
            self.add(host, err.into(), Stream::Err, None);
        }
    }

    fn add(&mut self, number: u16, pipe: OwnedFd, stream: Stream, greeting: Option<u16>) {
        self.sources.push(Source {
            rank: number,
            stream,
            pipe: pipe.into(),
            pending: Vec::new(),
            greeting,
            is_plain: self.ways.output == Output::Plain,
        });
    }

    /// Writes what the ranks print until all of it is written, and then tells `done`. It is not, as long as the returned ways
    /// are kept.
    pub(crate) fn start(self, done: Sender<Event>) -> io::Result<Ways> {
        let Self {
            ways,
            prefixes,
            mut sources,
            is_writing,
        } = self;
        thread::Builder::new()
            .name("output".to_owned())
            .spawn(move || {
                let mut screen = Screen::new(prefixes);
                while !sources.is_empty() {
                    let ready = wait(&sources);
                    let mut ready = ready.iter();
                    sources.retain_mut(|source| {
                        !ready.next().is_some_and(|&ready| ready) || source.read(&mut screen, &done)
                    });
                    is_writing.store(true, Ordering::Relaxed);
                    screen.flush();
                    is_writing.store(false, Ordering::Relaxed);
                }
                screen.flush();
                // The receiver is gone when the launcher was asked to end at once.
                let _ = done.send(Event::Printed);
            })?;
        Ok(ways)
    }
}

/// The ways of the ranks' output, by which a rank that is started again goes on.
pub(crate) struct Ways {
    output: Output,
    /// Of each rank that has them: to the output, and to the errors.
    pipes: BTreeMap<u16, [PipeWriter; 2]>,
}

impl Ways {
    /// `rank` has been started, and will not be again.
    pub(crate) fn let_go(&mut self, rank: u16) {
        self.pipes.remove(&rank);
    }

    /// Leads the output of `rank`, which `command` will start, to where it goes.
    pub(crate) fn lead(&self, rank: u16, command: &mut Command) -> io::Result<()> {
        if let Some([out, err]) = self.pipes.get(&rank) {
            command.stdout(out.try_clone()?).stderr(err.try_clone()?);
        }
        if let Output::Folder(folder) = &self.output {
            let [out, err] =
                files(folder, rank).map(|file| File::options().append(true).open(file));
            command.stdout(out?).stderr(err?);
        }
        Ok(())
    }
}

/// The files that a rank's output and errors go to.
pub(crate) fn files(folder: &Path, rank: u16) -> [PathBuf; 2] {
    ["out", "err"].map(|kind| folder.join(format!("rank-{rank}.{kind}")))
}

/// Which of `sources` have something to read, or have ended.
fn wait(sources: &[Source]) -> Vec<bool> {
    let mut polled: Vec<PollFd<'_>> = sources
        .iter()
        .map(|source| PollFd::from_borrowed_fd(source.pipe.as_fd(), PollFlags::IN))
        .collect();
    // Interrupted, or out of kernel memory: nothing is ready, and the next call tells more.
    let _ = poll(&mut polled, None);
    polled
        .iter()
        .map(|polled| !polled.revents().is_empty())
        .collect()
}

/// One pipe, and what was read from it and not yet written.
struct Source {
    rank: u16,
    stream: Stream,
    pipe: File,
    pending: Vec<u8>,
    /// The number of a host whose launcher has not said yet that it has its order.
    greeting: Option<u16>,
    /// Whether bytes are passed on as they come.
    is_plain: bool,
}

impl Source {
    /// Reads what is there. False when there will be no more, or when the output is closed.
    fn read(&mut self, screen: &mut Screen, events: &Sender<Event>) -> bool {
        let mut bytes = [0; 1 << 16];
        let count = match self.pipe.read(&mut bytes) {
            Err(error) if error.kind() == ErrorKind::Interrupted => return true,
            Ok(count) => count,
            Err(_) => 0,
        };
        self.pending.extend_from_slice(&bytes[..count]);
        let mut unseen = self.pending.len() - count;
        if self.greeting.is_some() {
            self.greet(screen, events);
            unseen = 0;
            if let Some(host) = self.greeting.filter(|_| count == 0) {
                let _ = events.send(Event::Mute { host });
            }
        }
        if self.is_plain && self.greeting.is_none() {
            screen.plain(self.stream, &self.pending);
            self.pending.clear();
            return count > 0 && !screen.is_closed(self.stream);
        }
        if count == 0 {
            if !self.pending.is_empty() {
                screen.line(self.rank, self.stream, &self.pending);
            }
            return false;
        }
        let mut begin = 0;
        for end in (unseen..self.pending.len()).filter(|&at| self.pending[at] == b'\n') {
            screen.line(self.rank, self.stream, &self.pending[begin..end]);
            begin = end + 1;
        }
        self.pending.drain(..begin);
        if self.pending.len() >= LONGEST_LINE {
            screen.line(self.rank, self.stream, &self.pending);
            self.pending.clear();
        } else if self.pending.contains(&b'\r') {
            screen.show(self.rank, self.stream, &self.pending);
        }
        // A reader that is gone is noticed by the rank itself, by SIGPIPE, when its pipe closes.
        !screen.is_closed(self.stream)
    }

    /// Takes the lines up to the one by which a host's launcher says that it has its order.
    fn greet(&mut self, screen: &mut Screen, events: &Sender<Event>) {
        while let Some(host) = self.greeting
            && let Some(end) = self.pending.iter().position(|&byte| byte == b'\n')
        {
            let line: Vec<u8> = self.pending.drain(..=end).collect();
            if let Some(port) = order::port_in(&line) {
                self.greeting = None;
                let _ = events.send(Event::Ready { host, port });
            } else if !line.trim_ascii().is_empty() {
                screen.line(self.rank, Stream::Err, &line[..end]);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::sync::{Mutex, mpsc};

    use super::*;
    use crate::screen::Sink;

    #[derive(Clone, Default)]
    struct Shared(Arc<Mutex<Vec<u8>>>);

    impl Write for Shared {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().expect("no panic").extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    /// The text that a terminal, or a file, gets when rank `n` prints `pieces[n]` piece by piece, in turns.
    fn printed(pieces: &[&[&str]], is_terminal: bool) -> String {
        let shared = Shared::default();
        let sink = || Sink::new(Box::new(shared.clone()), false, is_terminal);
        let mut screen = Screen {
            prefixes: Prefixes::new(u16::try_from(pieces.len()).expect("few")),
            out: sink(),
            err: sink(),
        };
        let mut ranks = Vec::new();
        for rank in 0..pieces.len() {
            let (reader, writer) = io::pipe().expect("a pipe");
            let pipe = File::from(OwnedFd::from(reader));
            let rank = u16::try_from(rank).expect("few");
            ranks.push((
                Source {
                    rank,
                    stream: Stream::Out,
                    pipe,
                    pending: Vec::new(),
                    greeting: None,
                    is_plain: false,
                },
                Some(writer),
            ));
        }
        for turn in 0..=pieces.iter().map(|pieces| pieces.len()).max().unwrap_or(0) {
            for ((source, writer), pieces) in ranks.iter_mut().zip(pieces) {
                match (pieces.get(turn), writer.as_mut()) {
                    // Nothing this turn; reading would wait.
                    (Some(&""), _) => continue,
                    (Some(piece), Some(writer)) => {
                        writer.write_all(piece.as_bytes()).expect("written")
                    }
                    (None, Some(_)) => *writer = None,
                    (_, None) => continue,
                }
                source.read(&mut screen, &mpsc::channel().0);
                screen.flush();
            }
        }
        let bytes = shared.0.lock().expect("no panic").clone();
        String::from_utf8(bytes).expect("text")
    }

    #[test]
    fn lines_are_whole_and_carry_their_rank() {
        let pieces: &[&[&str]] = &[&["a", "b\nc", "\n\nd\n"], &["x\n", "y", "z"]];
        assert_eq!(
            printed(pieces, false),
            "[1] x\n[0] ab\n[0] c\n[0] \n[0] d\n[1] yz\n"
        );
    }

    /// The text that is printed of `pieces` from a host, to the output and to the errors, and the events that tell of it.
    fn from_host(pieces: &[&str], is_plain: bool) -> (String, String, Vec<Event>) {
        let (reader, mut writer) = io::pipe().expect("a pipe");
        let [out, err] = [(); 2].map(|()| Shared::default());
        let mut screen = Screen {
            prefixes: Prefixes { width: None },
            out: Sink::new(Box::new(out.clone()), false, false),
            err: Sink::new(Box::new(err.clone()), false, false),
        };
        let mut source = Source {
            rank: 1,
            stream: Stream::Out,
            pipe: OwnedFd::from(reader).into(),
            pending: Vec::new(),
            greeting: Some(1),
            is_plain,
        };
        let (sender, events) = mpsc::channel();
        for piece in pieces {
            writer.write_all(piece.as_bytes()).expect("written");
            assert!(source.read(&mut screen, &sender));
        }
        drop(writer);
        assert!(!source.read(&mut screen, &sender));
        screen.flush();
        let text = |shared: &Shared| shared.0.lock().expect("no panic").clone();
        let [out, err] = [&out, &err].map(|shared| String::from_utf8(text(shared)).expect("text"));
        drop(sender);
        (out, err, events.iter().collect())
    }

    #[test]
    fn what_a_host_greets_with_is_told_from_what_its_ranks_print() {
        let port = "unisono launch: the ranks meet at port 80\n";
        let ready = vec![Event::Ready { host: 1, port: 80 }];
        let whole = format!("Welcome\n$\n{port}[1] a\n[1] b");
        let (out, err, events) = from_host(&[&whole], false);
        assert_eq!(
            (&*out, &*err, events),
            ("[1] a\n[1] b\n", "Welcome\n$\n", ready.clone())
        );
        let (begin, end) = port.split_at(11);
        let pieces = ["Welcome\n\n", begin, end, "a", "?", "b\r\n"];
        let (out, err, events) = from_host(&pieces, true);
        assert_eq!((&*out, &*err, events), ("a?b\r\n", "Welcome\n", ready));
        let (out, err, events) = from_host(&["not a launcher\n", "at all"], true);
        assert_eq!(
            (&*out, &*err, events),
            (
                "at all\n",
                "not a launcher\n",
                vec![Event::Mute { host: 1 }]
            )
        );
    }

    #[test]
    fn a_line_without_end_is_cut() {
        let long = "x".repeat(LONGEST_LINE / 16);
        let pieces: Vec<&str> = vec![&long[..1 << 16]; 40];
        let text = printed(&[&pieces], false);
        assert_eq!(text.lines().count(), 3);
        assert_eq!(
            text.lines().next().map(str::len),
            Some("[0] ".len() + LONGEST_LINE)
        );
    }

    #[test]
    fn a_progress_bar_is_shown_below_the_lines() {
        let pieces: &[&[&str]] = &[&["\r10%", "\r50%", "\r100%\n"], &["", "hello\n"]];
        assert_eq!(printed(pieces, false), "[1] hello\n[0] 100%\n");
        let erase = "\r\x1b[K";
        assert_eq!(
            printed(pieces, true),
            format!("[0] 10%{erase}[0] 50%{erase}[1] hello\n[0] 100%\n")
        );
    }

    #[test]
    fn windows_line_ends_do_not_hide_the_line() {
        assert_eq!(printed(&[&["a\r\n"]], false), "[0] a\n");
    }
}
