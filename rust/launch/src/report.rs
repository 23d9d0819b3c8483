//! The report on a job that has failed: which rank was first, how, and what became of the others.

use std::path::Path;
use std::sync::OnceLock;
use std::time::Duration;

use anstyle::{AnsiColor, Effects, Style};

use crate::output;
use crate::rank::{Ended, Ending, Rank, Why, status_of_signal};
use crate::signals::name;

/// The user's name for this host, where there are several.
static HOST: OnceLock<String> = OnceLock::new();

/// From now on says which of several hosts speaks.
pub(crate) fn speak_of(host: &str) {
    let _ = HOST.set(format!(" on {host}"));
}

/// Says `text` on standard error, in the launcher's name.
pub(crate) fn say(text: &str) {
    const NAME: Style = AnsiColor::Red.on_default().effects(Effects::BOLD);
    let host = HOST.get().map_or("", String::as_str);
    anstream::eprintln!("{NAME}unisono launch{host}:{NAME:#} {text}");
}

/// A job whose ranks have all ended.
pub(crate) struct Job<'a> {
    /// How many ranks the job has, on all hosts.
    pub(crate) world: u16,
    /// Whether other launchers have the rest of it, and one says what became of all.
    pub(crate) is_part: bool,
    /// The ranks of this host.
    pub(crate) ranks: &'a [Rank],
    /// The rank whose failure was seen first.
    pub(crate) first: Option<u16>,
    /// The last of the signals that were passed on and asked the ranks to end.
    pub(crate) asked_by: Option<i32>,
    /// Why SIGKILL was sent.
    pub(crate) killed_because: &'a str,
    /// Where the output went, if to files.
    pub(crate) folder: Option<&'a Path>,
}

impl Job<'_> {
    /// The status to exit with.
    pub(crate) fn status(&self) -> u8 {
        match (self.first(), self.asked_by) {
            (Some(first), _) => first.how.status(),
            (None, Some(signal)) if self.endings().any(|(_, ended)| ended.how.is_failure()) => {
                status_of_signal(signal)
            }
            (None, _) => 0,
        }
    }

    /// The report, line by line. Empty when all went well.
    pub(crate) fn lines(&self) -> Vec<String> {
        let mut lines = Vec::new();
        let world = self.world;
        if let (Some(number), Some(first)) = (self.first, self.first()) {
            let ended_by = match first.how {
                Ending::Signal { signal, .. } => self.asked_by.filter(|&asked| asked == signal),
                Ending::Code(_) => None,
            };
            lines.extend(match ended_by {
                Some(_) if self.is_part => None,
                Some(signal) => Some(format!("ended by {}", name(signal))),
                None => Some(format!(
                    "rank {number} of {world} failed first, after {}: {}{}",
                    seconds(first.after),
                    first.how,
                    self.files(number),
                )),
            });
            let others =
                |why| self.numbers(move |ended| ended.why == why && ended.how.is_failure());
            if ended_by.is_none() {
                let too = self.endings().filter(|(rank, ended)| {
                    *rank != number && ended.why == Why::Itself && ended.how.is_failure()
                });
                lines.extend(
                    too.map(|(rank, ended)| format!("rank {rank} failed too: {}", ended.how)),
                );
                lines.extend(sentence(&others(Why::Asked), "ended because of it"));
            }
        }
        let killed = self.numbers(|ended| ended.why == Why::Killed);
        lines.extend(sentence(
            &killed,
            &format!("killed: {}", self.killed_because),
        ));
        lines
    }

    fn first(&self) -> Option<Ended> {
        let first = self.first?;
        self.endings()
            .find(|(number, _)| *number == first)
            .map(|(_, ended)| ended)
    }

    fn endings(&self) -> impl Iterator<Item = (u16, Ended)> {
        self.ranks
            .iter()
            .filter_map(|rank| Some((rank.number, rank.ended?)))
    }

    fn numbers(&self, wanted: impl Fn(&Ended) -> bool) -> Vec<u16> {
        self.endings()
            .filter(|(_, ended)| wanted(ended))
            .map(|(number, _)| number)
            .collect()
    }

    fn files(&self, rank: u16) -> String {
        self.folder.map_or_else(String::new, |folder| {
            let [out, err] = output::files(folder, rank);
            format!(" (see {} and {})", err.display(), out.display())
        })
    }
}

/// `ranks 0, 1 and 3 were ...`, if there is any.
fn sentence(ranks: &[u16], what: &str) -> Option<String> {
    match ranks {
        [] => None,
        [one] => Some(format!("rank {one} was {what}")),
        many => Some(format!("ranks {} were {what}", listed(many))),
    }
}

/// `0, 2-4 and 7`.
fn listed(numbers: &[u16]) -> String {
    let mut runs: Vec<(u16, u16)> = Vec::new();
    for &number in numbers {
        match runs.last_mut() {
            Some((_, last)) if *last + 1 == number => *last = number,
            _ => runs.push((number, number)),
        }
    }
    let mut parts = Vec::new();
    for (first, last) in runs {
        match last - first {
            0 => parts.push(format!("{first}")),
            1 => parts.extend([format!("{first}"), format!("{last}")]),
            _ => parts.push(format!("{first}-{last}")),
        }
    }
    match parts.split_last() {
        Some((last, before)) if !before.is_empty() => format!("{} and {last}", before.join(", ")),
        _ => parts.concat(),
    }
}

pub(crate) fn seconds(time: Duration) -> String {
    format!("{:.1} s", time.as_secs_f64())
}

#[cfg(test)]
mod tests {
    use rustix::process::getpid;

    use super::*;

    const TERMINATED: Ending = Ending::Signal {
        signal: 15,
        dumped: false,
    };

    fn ranks(endings: &[(Ending, Why)]) -> Vec<Rank> {
        let after = Duration::from_millis(1230);
        let ended = |&(how, why)| Some(Ended { how, after, why });
        let ranks = endings.iter().zip(0..);
        ranks
            .map(|(ending, number)| Rank {
                number,
                pid: getpid(),
                since: Duration::ZERO,
                restarts: 0,
                again_at: None,
                ended: ended(ending),
            })
            .collect()
    }

    fn job(ranks: &[Rank], first: Option<u16>, asked_by: Option<i32>) -> Job<'_> {
        Job {
            world: u16::try_from(ranks.len()).expect("few"),
            is_part: false,
            ranks,
            first,
            asked_by,
            killed_because: "late",
            folder: None,
        }
    }

    #[test]
    fn success_is_silent() {
        let ranks = ranks(&[(Ending::Code(0), Why::Itself); 2]);
        let job = job(&ranks, None, None);
        assert_eq!((job.lines(), job.status()), (Vec::new(), 0));
    }

    #[test]
    fn the_first_failure_is_told_from_its_consequences() {
        let ranks = ranks(&[
            (TERMINATED, Why::Asked),
            (Ending::Code(1), Why::Itself),
            (Ending::Code(3), Why::Itself),
            (
                Ending::Signal {
                    signal: 9,
                    dumped: false,
                },
                Why::Killed,
            ),
            (Ending::Code(0), Why::Asked),
            (Ending::Code(7), Why::Asked),
        ]);
        let mut job = job(&ranks, Some(2), None);
        assert_eq!(
            job.lines(),
            [
                "rank 2 of 6 failed first, after 1.2 s: exit code 3",
                "rank 1 failed too: exit code 1",
                "ranks 0 and 5 were ended because of it",
                "rank 3 was killed: late",
            ]
        );
        assert_eq!(job.status(), 3);
        job.folder = Some(Path::new("logs"));
        assert!(job.lines()[0].ends_with("(see logs/rank-2.err and logs/rank-2.out)"));
    }

    #[test]
    fn signals_are_named() {
        let ranks = ranks(&[(
            Ending::Signal {
                signal: 11,
                dumped: true,
            },
            Why::Itself,
        )]);
        let job = job(&ranks, Some(0), None);
        assert!(
            job.lines()[0].ends_with("killed by SIGSEGV, core dumped"),
            "{:?}",
            job.lines()
        );
        assert_eq!(job.status(), 139);
    }

    #[test]
    fn a_job_that_its_user_ended_reports_no_failures() {
        let interrupted = ranks(
            &[(
                Ending::Signal {
                    signal: 2,
                    dumped: false,
                },
                Why::Itself,
            ); 3],
        );
        let ended = job(&interrupted, Some(0), Some(2));
        assert_eq!(
            (ended.lines(), ended.status()),
            (vec!["ended by SIGINT".to_owned()], 130)
        );
        let killed = ranks(
            &[(
                Ending::Signal {
                    signal: 9,
                    dumped: false,
                },
                Why::Killed,
            ); 3],
        );
        let ended = job(&killed, None, Some(2));
        assert_eq!(
            (ended.lines(), ended.status()),
            (vec!["ranks 0-2 were killed: late".to_owned()], 130)
        );
        // Of several hosts the launcher says it once.
        let part = Job {
            is_part: true,
            ..job(&interrupted, Some(0), Some(2))
        };
        assert_eq!((part.lines(), part.status()), (Vec::new(), 130));
        let graceful = ranks(&[(Ending::Code(0), Why::Itself); 3]);
        assert_eq!(job(&graceful, None, Some(15)).status(), 0);
    }

    #[test]
    fn lists() {
        assert_eq!(listed(&[4]), "4");
        assert_eq!(listed(&[0, 1]), "0 and 1");
        assert_eq!(listed(&[0, 2, 3, 4, 7]), "0, 2-4 and 7");
    }
}
