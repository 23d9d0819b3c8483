use super::*;
use crate::temporary::Temporary;

fn member(rank: Rank) -> Member {
    Member {
        group: "0123456789abcdef".to_owned(),
        rank,
        numbers: vec![0, 1],
    }
}

fn event(sequence: u64, begin: Instant, end: Instant) -> Event {
    Event {
        collective: Collective::AllReduce,
        sequence,
        bytes: 64,
        algorithm: Some(Algorithm::Ring),
        peer: None,
        tag: None,
        begin,
        end,
        waited: vec![(1, Duration::from_millis(2))],
        failure: None,
    }
}

fn count(text: &[u8], part: &str) -> usize {
    let parts = text.windows(part.len());
    parts.filter(|window| *window == part.as_bytes()).count()
}

/// The bytes of the only file of a folder.
fn only_file(folder: &Path) -> Vec<u8> {
    let files: Vec<_> = fs::read_dir(folder).unwrap().collect();
    let [Ok(file)] = &files[..] else {
        panic!("{files:?}")
    };
    let name = file.file_name().into_string().unwrap();
    assert!(name.starts_with("rank-0001-"), "{name}");
    fs::read(file.path()).unwrap()
}

#[test]
fn closing_a_track_writes_its_events() {
    let folder = Temporary::new();
    let (first, second) = (member(1), member(0));
    let track = Track::open(&folder.0, &first).unwrap();
    let other = Track::open(&folder.0, &second).unwrap();
    let now = Instant::now();
    let at = |ms| now + Duration::from_millis(ms);
    track.record(event(1, at(0), at(5)));
    // It overlaps the first and needs a row of its own; the third follows the second there.
    track.record(event(2, at(3), at(7)));
    track.record(event(3, at(7), at(9)));
    track.note_clock(-5, 3);
    drop(track);
    other.record(event(1, at(0), at(1)));
    drop(other);
    let bytes = only_file(&folder.0);
    assert_eq!(count(&bytes, "all_reduce"), 4);
    assert_eq!(count(&bytes, "ring"), 4);
    assert_eq!(count(&bytes, "waited_ns"), 4);
    assert_eq!(count(&bytes, "offset_ns"), 1);
    assert_eq!(count(&bytes, "beside 2"), 1);
    assert_eq!(count(&bytes, "beside 3"), 0);
}

#[test]
fn a_full_buffer_counts_those_that_it_loses() {
    let folder = Temporary::new();
    let track = Track::open(&folder.0, &member(1)).unwrap();
    let now = Instant::now();
    {
        // The thread cannot write meanwhile.
        let output = track.writer.output.lock();
        for sequence in 0..MOST_KEPT as u64 + 5 {
            track.record(event(sequence, now, now));
        }
        drop(output);
    }
    drop(track);
    let bytes = only_file(&folder.0);
    assert_eq!(count(&bytes, "all_reduce"), MOST_KEPT);
    assert_eq!(count(&bytes, "lost"), 1);
}

#[test]
fn a_folder_that_cannot_be_made_is_an_error() {
    let error = Track::open(Path::new("/proc/trace"), &member(0)).unwrap_err();
    assert!(error.message.contains("/proc/trace"), "{error}");
}
