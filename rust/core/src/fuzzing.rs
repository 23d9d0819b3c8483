//! Entry points of the fuzz targets (`fuzz/`): everything that is parsed from a peer or from the environment.
//!
//! Each takes any bytes and must not panic, nor take more memory than the bytes are worth. Private items of the crate are
//! reached through here alone, in builds for fuzzing and for tests; a test gives each target its corpus.

use std::io::Write;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use crate::config::Config;
use crate::rendezvous::launcher;
use crate::transport::PeerState;
use crate::transport::control::{Control, Frame};
use crate::transport::endpoint::Address;

pub use crate::engine::fuzzing::{message, position};
pub use crate::engine::membership::fuzzing::agreement;
pub use crate::one_sided::fuzzing::one_sided;
pub use crate::rendezvous::fuzzing::{
    record, store_file, store_hello, store_reply, store_request, unique_id,
};
pub use crate::transport::fuzzing::{handshake, request, sealed};
pub use crate::transport::shm::fuzzing::description;
pub use crate::window::fuzzing::window;

/// A published address: refused, or read as one that writes the same bytes.
pub fn address(bytes: &[u8]) {
    if let Ok(address) = Address::from_bytes(bytes) {
        assert_eq!(address.to_bytes(), bytes);
        let _ = address.to_string();
    }
}

/// The bytes of a control channel: each frame that is read is the same when it is written and read again (a long message is
/// cut), and a channel survives them.
pub fn control(bytes: &[u8]) {
    let mut rest = bytes;
    while let Ok(Some((frame, length))) = Frame::parse(rest) {
        let mut written = Vec::new();
        frame.write(&mut written);
        let again = Frame::parse(&written).expect("a frame").expect("whole");
        assert_eq!(again, (cut(frame), written.len()));
        rest = &rest[length..];
    }
    for with_segments in [false, true] {
        let (ours, mut theirs) = UnixStream::pair().expect("descriptors");
        let mut control = match with_segments {
            false => Control::new(ours),
            true => Control::with_segments(ours),
        };
        // In two parts, cut somewhere. It must not block: a socket holds far more than is fuzzed with.
        let middle = bytes
            .first()
            .map_or(0, |first| usize::from(*first))
            .min(bytes.len());
        for part in [&bytes[..middle], &bytes[middle..]] {
            let _ = theirs.write_all(&part[..part.len().min(32 << 10)]);
            let state = control.peer_state();
            let _ = control.take_position();
            assert!(!matches!(state, PeerState::Lost(why) if why.is_empty()));
        }
        drop(theirs);
        let deadline = Instant::now() + Duration::from_secs(5);
        while control.peer_state() == PeerState::Present {
            // A process that lists descriptors in /proc may hold the socket open for a moment.
            assert!(Instant::now() < deadline, "a closed end is not noticed");
        }
    }
}

/// The frame as it travels: a long message is cut.
fn cut(frame: Frame) -> Frame {
    let Frame::Abort(mut notice) = frame else {
        return frame;
    };
    let mut end = notice
        .message
        .len()
        .min(crate::transport::control::MAX_MESSAGE);
    while !notice.message.is_char_boundary(end) {
        end -= 1;
    }
    notice.message.truncate(end);
    Frame::Abort(notice)
}

/// Settings, `name=value` in each line, as arguments and as variables: what is taken is shown as what means the same.
pub fn settings(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else {
        return;
    };
    let pairs = || text.lines().filter_map(|line| line.split_once('='));
    let variables = pairs().map(|(name, value)| (format!("UNISONO_{name}").into(), value.into()));
    let _ = Config::from_variables(variables);
    let mut config = Config::default();
    for (name, value) in pairs() {
        let _ = config.set(name, value);
    }
    let mut same = Config::default();
    for (name, value) in config.agreed() {
        same.set(name, &value).expect("its own value");
    }
    assert_eq!(same.digest(), config.digest());
}

/// The variables of a launcher, `NAME=value` in each line.
pub fn launch(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else {
        return;
    };
    let lookup = |name: &str| {
        let mut pairs = text.lines().filter_map(|line| line.split_once('='));
        pairs
            .find(|(known, _)| *known == name)
            .map(|(_, value)| value.to_owned())
    };
    if let Ok(launch) = launcher::detect_from(&lookup, 1) {
        assert!(launch.rank < launch.world);
        if let Some(master) = launch.master {
            assert!(!master.candidates().contains(&0));
        }
    }
}

/// A function that takes any bytes.
pub type Target = fn(&[u8]);

/// Every target, by name.
pub const TARGETS: [(&str, Target); 19] = [
    ("address", address),
    ("agreement", agreement),
    ("control", control),
    ("description", description),
    ("handshake", handshake),
    ("launch", launch),
    ("message", message),
    ("one_sided", one_sided),
    ("position", position),
    ("record", record),
    ("request", request),
    ("sealed", sealed),
    ("settings", settings),
    ("store_file", store_file),
    ("store_hello", store_hello),
    ("store_reply", store_reply),
    ("store_request", store_request),
    ("unique_id", unique_id),
    ("window", window),
];

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;

    fn folder() -> PathBuf {
        PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../fuzz")
    }

    /// Earlier findings do not come back, and every target has a file and at least one seed.
    #[test]
    fn the_corpora_pass() {
        for (name, target) in TARGETS {
            let program = folder().join(format!("fuzz_targets/{name}.rs"));
            assert!(program.exists(), "{} is missing", program.display());
            let corpus = folder().join("corpus").join(name);
            let files = std::fs::read_dir(&corpus).unwrap_or_else(|error| {
                panic!("{}: {error}; write it by the test below", corpus.display())
            });
            let mut seeds = 0;
            for file in files {
                target(&std::fs::read(file.unwrap().path()).unwrap());
                seeds += 1;
            }
            assert!(seeds > 0, "{} is empty", corpus.display());
        }
        let programs = std::fs::read_dir(folder().join("fuzz_targets")).unwrap();
        assert_eq!(programs.count(), TARGETS.len());
    }

    /// `cargo test -p unisono --lib fuzzing -- --ignored` after a format has changed.
    #[test]
    #[ignore = "run by hand after a change of a format: it writes the seeds in fuzz/corpus anew"]
    fn write_seeds() {
        for (target, name, bytes) in seeds() {
            let path = folder().join("corpus").join(target);
            std::fs::create_dir_all(&path).unwrap();
            std::fs::write(path.join(name), bytes).unwrap();
        }
    }

    /// A seed of an old format is refused at its first bytes, and teaches nothing. Seeds with random parts differ each time.
    #[test]
    fn the_seeds_are_of_these_formats() {
        const DRAWN: [&str; 3] = ["handshake", "store_hello", "unique_id"];
        let old: Vec<_> = seeds()
            .into_iter()
            .filter(|(target, ..)| !DRAWN.contains(&target.as_str()))
            .filter(|(target, name, bytes)| {
                let path = folder().join("corpus").join(target).join(name);
                std::fs::read(path).ok().as_ref() != Some(bytes)
            })
            .map(|(target, name, _)| format!("{target}/{name}"))
            .collect();
        assert!(
            old.is_empty(),
            "write the seeds anew, as the module says: {old:?}"
        );
    }

    /// Every seed: its target, its name, its bytes.
    #[expect(clippy::too_many_lines, reason = "one seed after the other")]
    fn seeds() -> Vec<(String, String, Vec<u8>)> {
        use crate::transport::handshake::Purpose;
        use crate::transport::{Notice, POSITION_BYTES, Part, SocketId};

        let mut all = Vec::new();
        let mut write = |target: &str, name: &str, bytes: &[u8]| {
            all.push((target.to_owned(), name.to_owned(), bytes.to_vec()));
        };
        let mut every = Vec::new();
        let notice = Notice {
            code: crate::error::Code::PeerLost,
            origin: 1,
            culprit: Some(2),
            message: "rank 2 is gone".into(),
        };
        let identity = crate::heap::Identity {
            segment: 1,
            bytes: 1 << 20,
            inode: 7,
        };
        let frames = [
            Frame::Doorbell,
            Frame::Position([7; POSITION_BYTES]),
            Frame::Question,
            Frame::Answer,
            Frame::Framing(1 << 40),
            Frame::FramingHeard,
            Frame::Broken(SocketId {
                part: Part::Stripe(7),
                number: 1,
            }),
            Frame::Segment(identity),
            Frame::SegmentAnswer {
                segment: 1,
                mapped: true,
            },
            Frame::SegmentGone(1),
            Frame::Farewell,
            Frame::Abort(notice),
        ];
        for (index, frame) in frames.iter().enumerate() {
            let before = every.len();
            frame.write(&mut every);
            write("control", &format!("frame-{index}"), &every[before..]);
        }
        write("control", "every-frame", &every);
        let defaults: String = Config::default()
            .agreed()
            .iter()
            .map(|(name, value)| format!("{name}={value}\n"))
            .collect();
        write("settings", "defaults", defaults.as_bytes());
        let others = "timeout=1.5\njoin_timeout=none\ninterface=eth0\nlend_bytes=64K\nheap_bytes=2G\n\
                      spin_us=10\nsecret_file=/a/b\nflight_records=5\nlog=debug\nthreads=3\nhost=a\nTIMEOUT=3\n";
        write("settings", "others", others.as_bytes());
        let launchers = [
            "RANK=1\nWORLD_SIZE=2\nMASTER_ADDR=node0\nMASTER_PORT=29500\nLOCAL_RANK=1\nLOCAL_WORLD_SIZE=2\n",
            "OMPI_COMM_WORLD_RANK=0\nOMPI_COMM_WORLD_SIZE=2\nOMPI_COMM_WORLD_LOCAL_RANK=0\n\
             OMPI_COMM_WORLD_LOCAL_SIZE=2\nPMIX_NAMESPACE=job-1\n",
            "PMI_RANK=1\nPMI_SIZE=4\nMPI_LOCALRANKID=1\nMPI_LOCALNRANKS=4\n",
            "SLURM_PROCID=3\nSLURM_NTASKS=8\nSLURM_LOCALID=1\nSLURM_JOB_ID=77\nSLURM_STEP_ID=0\n\
             SLURM_STEP_NODELIST=node[1-2,07]\nSLURM_NODELIST=node[1-2,07]\n",
        ];
        for (index, launcher) in launchers.iter().enumerate() {
            write("launch", &format!("launcher-{index}"), launcher.as_bytes());
        }
        for (name, bytes) in crate::engine::fuzzing::seeds() {
            write("message", &name, &bytes);
        }
        for (name, bytes) in crate::engine::membership::fuzzing::seeds() {
            write("agreement", &name, &bytes);
        }
        for (name, bytes) in crate::one_sided::fuzzing::seeds() {
            write("one_sided", name, &bytes);
        }
        for (name, bytes) in crate::window::fuzzing::seeds() {
            write("window", name, &bytes);
        }
        for (name, bytes) in crate::engine::fuzzing::positions() {
            write("position", &name, &bytes);
        }
        for (name, bytes) in crate::transport::fuzzing::records() {
            write("sealed", &name, &bytes);
        }
        for (name, bytes) in crate::transport::shm::fuzzing::seeds() {
            write("description", &name, &bytes);
        }
        for purpose in 0..=Purpose::ALL.len() as u8 {
            write("request", &format!("purpose-{purpose}"), &[purpose; 18]);
        }
        for (index, bytes) in crate::transport::fuzzing::messages().iter().enumerate() {
            write("request", &format!("message-{index}"), bytes);
        }
        for (target, name, bytes) in crate::rendezvous::fuzzing::seeds() {
            write(target, name, &bytes);
        }
        write(
            "handshake",
            "hello-challenge-proof-and-record",
            &crate::transport::fuzzing::seed(),
        );
        for (index, address) in Address::samples().iter().enumerate() {
            write("address", &format!("sample-{index}"), &address.to_bytes());
        }
        all
    }
}
