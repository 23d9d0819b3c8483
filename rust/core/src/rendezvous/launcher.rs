//! This process's rank, world size and master, from the environment that its launcher has set: torchrun (or `unisono
//! launch`, or the same variables set by hand), Open MPI, MPICH and its kin, Slurm, Kubernetes indexed jobs.
//!
//! The launchers are asked in this order, because the inner one knows better: torchrun inside a Slurm job starts
//! several ranks per task, and `mpirun` under Slurm starts one daemon per task. The first that gives a rank wins.
//! (Slurm may itself set MPICH's rank for its tasks, but not the variables about the host that MPICH's own launcher
//! sets.)
//! `WORLD_SIZE`, `MASTER_ADDR` and `MASTER_PORT` may be set under every launcher; they give the meeting point and
//! must not contradict the launcher. Everything here is a function of a lookup, so it is tested without touching
//! the environment.

use std::env;

use sha2::{Digest, Sha256};

use super::secret::Secret;
use crate::config::LAUNCH_SECRET;
use crate::error::{Error, Result};
use crate::types::Rank;

/// The port that is taken where the launcher implies none and one job has the host to itself.
const DEFAULT_PORT: u16 = 29500;
/// How many ports may be tried for the store, beginning with the master's.
const CANDIDATES: u16 = 16;

/// As many characters has a launch's secret at least.
const SHORTEST_SECRET: usize = 32;

/// What the launcher says about this process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Launch {
    /// This process's rank.
    pub rank: Rank,
    /// How many ranks there are.
    pub world: usize,
    /// This process's number on its host.
    pub local_rank: Option<usize>,
    /// How many ranks this host has.
    pub local_world: Option<usize>,
    /// Where the ranks meet. A world of one may have none.
    pub master: Option<Master>,
    /// What distinguishes this job from others that meet at neighbouring ports.
    pub job: String,
    /// What the launcher told its ranks alone, if it did.
    pub secret: Option<Secret>,
    /// The launcher, in words.
    pub source: &'static str,
}

/// Where the ranks of a job meet: the host of rank 0, and a port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Master {
    /// A name or an address of rank 0's host.
    pub host: String,
    /// The port that the launcher names, or that was derived from the job's name.
    pub port: u16,
    /// Whether the launcher itself serves at that port, so that ours must be another one.
    pub is_taken: bool,
}

impl Launch {
    fn is_one_host(&self, world: usize) -> bool {
        world <= self.world && self.local_world == Some(self.world)
    }
}

impl Master {
    /// The ports at which rank 0 may serve the store, in the order in which it tries them. Clients probe the same
    /// ones until one answers as the store of their job.
    pub fn candidates(&self) -> Vec<u16> {
        let first = u16::from(self.is_taken);
        (first..=CANDIDATES)
            .map(|step| {
                // Ports below 1024 are not ours to take: wrap around above them.
                match self.port.checked_add(step) {
                    Some(port) => port,
                    None => 1024 + (u32::from(self.port) + u32::from(step) - 65536) as u16,
                }
            })
            .collect()
    }
}

/// What the launcher says about this process.
///
/// # Errors
/// `InvalidArgument` when no launcher started it, or the variables are incomplete or contradict each other; the
/// message says which are set, which are missing, and how to start.
pub fn detect() -> Result<Launch> {
    detect_from(
        &|name| env::var(name).ok(),
        std::os::unix::process::parent_id(),
    )
}

/// Whether the launcher says that all its ranks are on this host, and a group of `world` ranks is not more than those.
pub fn is_one_host(world: usize) -> bool {
    detect().is_ok_and(|launch| launch.is_one_host(world))
}

/// The secret that the launcher gave to its ranks, for a group of `world` ranks that meets through a store of other
/// making: `None` where the launcher gave none, or the group has more ranks than it started.
pub fn secret(world: usize) -> Option<Secret> {
    let launch = detect().ok()?;
    launch.secret.filter(|_| world <= launch.world)
}

/// As [`detect`], from the variables that `lookup` gives and the id of the parent process.
///
/// # Errors
/// As [`detect`].
pub fn detect_from(lookup: &dyn Fn(&str) -> Option<String>, parent: u32) -> Result<Launch> {
    let variables = Variables { lookup };
    for launcher in LAUNCHERS {
        if variables.text(launcher.rank).is_some() && !launcher.is_slurm_in_disguise(&variables) {
            return launcher.launch(&variables, parent);
        }
    }
    Err(variables.incomplete(
        "no launcher's rank variable is set",
        &["RANK", "WORLD_SIZE"],
    ))
}

/// The variables by which one launcher speaks.
struct Launcher {
    name: &'static str,
    rank: &'static str,
    /// The world size; the first that is set counts.
    world: &'static [&'static str],
    local_rank: &'static [&'static str],
    local_world: &'static [&'static str],
    /// What names the job; the first that is set counts.
    job: &'static [&'static str],
}

const LAUNCHERS: &[Launcher] = &[
    Launcher {
        name: "torchrun",
        rank: "RANK",
        world: &["WORLD_SIZE"],
        local_rank: &["LOCAL_RANK"],
        local_world: &["LOCAL_WORLD_SIZE"],
        job: &["TORCHELASTIC_RUN_ID"],
    },
    Launcher {
        name: "Open MPI",
        rank: "OMPI_COMM_WORLD_RANK",
        world: &["OMPI_COMM_WORLD_SIZE"],
        local_rank: &["OMPI_COMM_WORLD_LOCAL_RANK"],
        local_world: &["OMPI_COMM_WORLD_LOCAL_SIZE"],
        job: &["PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"],
    },
    Launcher {
        name: "MPICH",
        rank: "PMI_RANK",
        world: &["PMI_SIZE"],
        local_rank: &["MPI_LOCALRANKID", "PMI_LOCAL_RANK"],
        local_world: &["MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"],
        job: &["PMI_JOBID"],
    },
    Launcher {
        name: "Slurm",
        rank: "SLURM_PROCID",
        world: &["SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"],
        local_rank: &["SLURM_LOCALID"],
        local_world: &[],
        job: &["SLURM_JOB_ID", "SLURM_JOBID"],
    },
    Launcher {
        name: "Kubernetes",
        rank: "JOB_COMPLETION_INDEX",
        world: &["WORLD_SIZE"],
        local_rank: &[],
        local_world: &[],
        job: &[],
    },
];

impl Launcher {
    /// Whether the variables are MPICH's, but `srun --mpi=pmi2` has set them.
    fn is_slurm_in_disguise(&self, variables: &Variables<'_>) -> bool {
        self.rank == "PMI_RANK"
            && variables.text("SLURM_PROCID").is_some()
            && self
                .local_rank
                .iter()
                .all(|name| variables.text(name).is_none())
    }

    fn launch(&self, variables: &Variables<'_>, parent: u32) -> Result<Launch> {
        let number = |name| variables.number(name);
        let rank = number(self.rank)?.unwrap_or_default();
        let Some(world) = variables.first_number(self.world)? else {
            let why = format!("{} is set, but the world size is not", self.rank);
            return Err(variables.incomplete(&why, &self.world[..1]));
        };
        if rank >= world {
            return Err(
                variables.wrong(&format!("rank {rank} is not below the world size {world}"))
            );
        }
        match number("WORLD_SIZE")? {
            Some(other) if other != world => {
                let why = format!("WORLD_SIZE is {other}, but {} says {world}", self.name);
                return Err(variables.wrong(&why));
            }
            _ => {}
        }
        let local_rank = variables.first_number(self.local_rank)?;
        let local_world = variables.first_number(self.local_world)?;
        if let (Some(local_rank), Some(local_world)) = (local_rank, local_world)
            && (local_rank >= local_world || local_world > world)
        {
            return Err(variables.wrong(&format!(
                "local rank {local_rank} of {local_world} does not fit into a world of {world}"
            )));
        }
        let job = self.job(variables, parent, local_world == Some(world));
        let master = self.master(variables, world, local_world, job.as_deref())?;
        let port = master.as_ref().map_or(0, |master| master.port);
        Ok(Launch {
            rank,
            world,
            local_rank,
            local_world,
            secret: variables.secret()?,
            job: format!("{} {} {port}", self.name, job.unwrap_or_default()),
            master,
            source: self.name,
        })
    }

    /// The name of the job, the same on all of its ranks, if the launcher gives one.
    fn job(&self, variables: &Variables<'_>, parent: u32, is_one_host: bool) -> Option<String> {
        let name = self.job.iter().find_map(|name| variables.text(name));
        if self.rank == "SLURM_PROCID" {
            let step = variables.text("SLURM_STEP_ID").unwrap_or_default();
            return name.map(|job| format!("{job}.{step}"));
        }
        // An MPI launcher that gives no name: on one host its ranks have the same parent process.
        let is_mpi = matches!(self.name, "Open MPI" | "MPICH");
        name.or_else(|| (is_mpi && is_one_host).then(|| format!("parent {parent}")))
    }

    /// The host of rank 0, if the environment names it.
    fn host(&self, variables: &Variables<'_>, is_one_host: bool) -> Option<String> {
        variables.text("MASTER_ADDR").or_else(|| match self.rank {
            "SLURM_PROCID" => [
                "SLURM_STEP_NODELIST",
                "SLURM_JOB_NODELIST",
                "SLURM_NODELIST",
            ]
            .iter()
            .find_map(|name| first_host(&variables.text(name)?))
            .or_else(|| variables.text("SLURM_LAUNCH_NODE_IPADDR")),
            // All ranks on this host.
            _ if is_one_host => Some("127.0.0.1".to_owned()),
            // `mpirun` in a Slurm job begins with its first host, unless an option says otherwise. (These variables
            // could also describe the step of its daemons, which may leave that host out.)
            "OMPI_COMM_WORLD_RANK" | "PMI_RANK" => variables
                .text("SLURM_JOB_NODELIST")
                .and_then(|list| first_host(&list)),
            _ => None,
        })
    }

    fn master(
        &self,
        variables: &Variables<'_>,
        world: usize,
        local_world: Option<usize>,
        job: Option<&str>,
    ) -> Result<Option<Master>> {
        let port = match variables.number("MASTER_PORT")? {
            Some(port) => Some(
                u16::try_from(port)
                    .ok()
                    .filter(|&port| port > 0)
                    .ok_or_else(|| {
                        variables.wrong(&format!("MASTER_PORT is {port}, but a port is 1 to 65535"))
                    })?,
            ),
            None => None,
        };
        let host = self.host(variables, local_world == Some(world));
        let port = port.or_else(|| match self.rank {
            "JOB_COMPLETION_INDEX" => Some(DEFAULT_PORT),
            "RANK" => None,
            _ => job.map(derived_port),
        });
        match (host, port) {
            (Some(host), Some(port)) => Ok(Some(Master {
                host,
                port,
                is_taken: self.rank == "RANK"
                    && variables.text("TORCHELASTIC_USE_AGENT_STORE").as_deref() == Some("True"),
            })),
            _ if world == 1 => Ok(None),
            (None, Some(_)) => {
                Err(variables.incomplete("where rank 0 is, is not said", &["MASTER_ADDR"]))
            }
            (Some(_), None) => {
                Err(variables.incomplete("no port to meet at is said", &["MASTER_PORT"]))
            }
            (None, None) => Err(variables.incomplete(
                "where the ranks meet is not said",
                &["MASTER_ADDR", "MASTER_PORT"],
            )),
        }
    }
}

/// The environment, or what a test puts in its place.
struct Variables<'a> {
    lookup: &'a dyn Fn(&str) -> Option<String>,
}

impl Variables<'_> {
    fn text(&self, name: &str) -> Option<String> {
        (self.lookup)(name)
            .map(|value| value.trim().to_owned())
            .filter(|value| !value.is_empty())
    }

    /// The secret of `unisono launch`, unless torchrun runs inside it: torchrun's ranks may be on other hosts as well,
    /// which do not have it.
    fn secret(&self) -> Result<Option<Secret>> {
        match self.text(LAUNCH_SECRET) {
            Some(_) if self.text("TORCHELASTIC_RUN_ID").is_some() => Ok(None),
            Some(text) if text.len() >= SHORTEST_SECRET => {
                Ok(Some(Secret::from_bytes(text.as_bytes())))
            }
            Some(_) => Err(Error::invalid(format!(
                "{LAUNCH_SECRET} was changed on its way: it is set by `unisono launch`, for its ranks"
            ))),
            None => Ok(None),
        }
    }

    fn number(&self, name: &str) -> Result<Option<usize>> {
        match self.text(name) {
            None => Ok(None),
            Some(text) => match text.parse() {
                Ok(number) => Ok(Some(number)),
                Err(_) => Err(self.wrong(&format!("{name} is {text:?}, which is no number"))),
            },
        }
    }

    fn first_number(&self, names: &[&str]) -> Result<Option<usize>> {
        for name in names {
            if let Some(number) = self.number(name)? {
                return Ok(Some(number));
            }
        }
        Ok(None)
    }

    fn incomplete(&self, why: &str, missing: &[&str]) -> Error {
        self.wrong(&format!("{why}; missing: {}", missing.join(", ")))
    }

    /// The error that says `why`, what is set, and how to start.
    fn wrong(&self, why: &str) -> Error {
        let mut names = vec!["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"];
        names.extend(["MASTER_ADDR", "MASTER_PORT"]);
        for launcher in &LAUNCHERS[1..] {
            let groups = [launcher.world, launcher.local_rank, launcher.local_world];
            names.push(launcher.rank);
            names.extend(groups.concat().iter().filter(|name| **name != "WORLD_SIZE"));
        }
        let set: Vec<String> = names
            .iter()
            .filter_map(|name| Some(format!("{name}={}", self.text(name)?)))
            .collect();
        let set = if set.is_empty() {
            "none".to_owned()
        } else {
            set.join(" ")
        };
        Error::invalid(format!(
            "cannot tell this process's rank and where the ranks meet: {why} (set: {set}); start with \
             `unisono launch -n 2 program`, torchrun, srun or mpirun (over several hosts the last, and Kubernetes \
             indexed jobs, with MASTER_ADDR and MASTER_PORT set), or call unisono.init(rank=..., world_size=..., \
             url=\"tcp://host:port\")"
        ))
    }
}

/// The first host of a Slurm node list: `node[03-07,9],other` is `node03`.
fn first_host(list: &str) -> Option<String> {
    let mut host = String::new();
    let mut rest = list;
    while let Some(next) = rest.chars().next() {
        match next {
            ',' => break,
            '[' => {
                let (inside, after) = rest[1..].split_once(']')?;
                host.push_str(inside.split([',', '-']).next()?);
                rest = after;
            }
            _ => {
                host.push(next);
                rest = &rest[next.len_utf8()..];
            }
        }
    }
    (!host.is_empty()).then_some(host)
}

/// A port made from a job's name, between the well-known ports and the ones the kernel hands out (from 32768).
fn derived_port(job: &str) -> u16 {
    let hash = Sha256::digest(job);
    15_000 + u16::from_le_bytes([hash[0], hash[1]]) % 17_000
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::error::Code;

    fn detect(variables: &[(&str, &str)]) -> Result<Launch> {
        detect_from(
            &|name| {
                let found = variables.iter().find(|(set, _)| *set == name);
                found.map(|(_, value)| (*value).to_owned())
            },
            4711,
        )
    }

    const TORCHRUN: &[(&str, &str)] = &[
        ("RANK", "3"),
        ("WORLD_SIZE", "4"),
        ("LOCAL_RANK", "1"),
        ("LOCAL_WORLD_SIZE", "2"),
        ("MASTER_ADDR", "node0"),
        ("MASTER_PORT", "29400"),
        ("TORCHELASTIC_RUN_ID", "abc"),
    ];

    #[test]
    fn torchrun() {
        let launch = detect(TORCHRUN).expect("complete");
        assert_eq!((launch.rank, launch.world), (3, 4));
        assert_eq!((launch.local_rank, launch.local_world), (Some(1), Some(2)));
        assert_eq!(launch.source, "torchrun");
        let master = launch.master.expect("a master");
        assert_eq!((master.host.as_str(), master.port), ("node0", 29400));
        assert_eq!(master.candidates()[..2], [29400, 29401]);
        // The agent serves torch's store at the master's port: ours is elsewhere.
        let mut with_agent = TORCHRUN.to_vec();
        with_agent.push(("TORCHELASTIC_USE_AGENT_STORE", "True"));
        let master = detect(&with_agent)
            .expect("complete")
            .master
            .expect("a master");
        assert_eq!(master.candidates()[0], 29401);
        // It wins over the Slurm job that it runs in.
        let mut in_slurm = TORCHRUN.to_vec();
        in_slurm.extend([("SLURM_PROCID", "0"), ("SLURM_NTASKS", "2")]);
        assert_eq!(detect(&in_slurm).expect("complete").rank, 3);
    }

    #[test]
    fn the_secret_of_a_launch_is_its_ranks_alone() {
        let secret = "0123456789abcdef0123456789abcdef";
        let mut variables = TORCHRUN[..6].to_vec();
        variables.push((LAUNCH_SECRET, secret));
        let launch = detect(&variables).expect("complete");
        assert_eq!(launch.secret, Some(Secret::from_bytes(secret.as_bytes())));
        assert!(!format!("{launch:?}").contains(secret));
        // Not those that torchrun started inside it.
        let mut inside = TORCHRUN.to_vec();
        inside.push((LAUNCH_SECRET, secret));
        assert_eq!(detect(&inside).expect("complete").secret, None);
        // An error does not show it.
        variables[0].1 = "9";
        let error = detect(&variables).expect_err("a wrong rank");
        assert!(!error.message.contains(secret), "{error}");
        variables[0].1 = "3";
        variables[6].1 = "0123";
        let error = detect(&variables).expect_err("cut off");
        assert!(error.message.contains("was changed"), "{error}");
        assert!(!error.message.contains("0123"), "{error}");
    }

    #[test]
    fn candidates_wrap_above_the_system_ports() {
        let master = Master {
            host: String::new(),
            port: 65530,
            is_taken: true,
        };
        let ports = master.candidates();
        assert_eq!(ports[..7], [65531, 65532, 65533, 65534, 65535, 1024, 1025]);
        assert_eq!(ports.len(), usize::from(CANDIDATES));
    }

    #[test]
    fn slurm() {
        let variables = [
            ("SLURM_PROCID", "2"),
            ("SLURM_NTASKS", "4"),
            ("SLURM_LOCALID", "0"),
            ("SLURM_JOB_ID", "991"),
            ("SLURM_STEP_ID", "0"),
            ("SLURM_JOB_NODELIST", "rack[1-2]n[05-08,11],login1"),
        ];
        let launch = detect(&variables).expect("complete");
        assert_eq!(
            (launch.rank, launch.world, launch.local_rank),
            (2, 4, Some(0))
        );
        let master = launch.master.expect("a master");
        assert_eq!(master.host, "rack1n05");
        assert!((15_000..32_000).contains(&master.port));
        // The same on another rank, another one for another step.
        let mut other = variables;
        other[0].1 = "3";
        assert_eq!(detect(&other).expect("complete").job, launch.job);
        other[4].1 = "1";
        assert_ne!(detect(&other).expect("complete").job, launch.job);
    }

    #[test]
    fn mpi() {
        let open_mpi = [
            ("OMPI_COMM_WORLD_RANK", "1"),
            ("OMPI_COMM_WORLD_SIZE", "2"),
            ("OMPI_COMM_WORLD_LOCAL_RANK", "1"),
            ("OMPI_COMM_WORLD_LOCAL_SIZE", "2"),
            ("PMIX_NAMESPACE", "prterun-node0-17@1"),
        ];
        let launch = detect(&open_mpi).expect("complete");
        assert_eq!(launch.source, "Open MPI");
        assert_eq!(launch.master.expect("one host").host, "127.0.0.1");
        let mut two_hosts = open_mpi.to_vec();
        two_hosts[1].1 = "4";
        let error = detect(&two_hosts).expect_err("no master");
        assert!(error.message.contains("missing: MASTER_ADDR"), "{error}");
        two_hosts.push(("MASTER_ADDR", "node0"));
        assert_eq!(
            detect(&two_hosts)
                .expect("complete")
                .master
                .expect("set")
                .host,
            "node0"
        );

        two_hosts.pop();
        two_hosts.extend([
            ("SLURM_JOB_NODELIST", "node[3-4]"),
            ("SLURM_STEP_NODELIST", "node4"),
        ]);
        let launch = detect(&two_hosts).expect("the job's hosts are known");
        assert_eq!(launch.source, "Open MPI");
        assert_eq!(launch.master.expect("first host").host, "node3");

        let mpich = [
            ("PMI_RANK", "0"),
            ("PMI_SIZE", "2"),
            ("MPI_LOCALRANKID", "0"),
            ("MPI_LOCALNRANKS", "2"),
        ];
        let launch = detect(&mpich).expect("complete");
        assert_eq!(launch.source, "MPICH");
        assert!(launch.master.is_some() && launch.job.contains("4711"));
    }

    #[test]
    fn slurm_that_speaks_pmi_is_slurm() {
        let mut variables = vec![
            ("PMI_RANK", "1"),
            ("PMI_SIZE", "2"),
            ("SLURM_PROCID", "1"),
            ("SLURM_NTASKS", "2"),
            ("SLURM_JOB_ID", "7"),
            ("SLURM_JOB_NODELIST", "node[1-2]"),
        ];
        let launch = detect(&variables).expect("complete");
        assert_eq!((launch.source, launch.rank), ("Slurm", 1));
        assert_eq!(launch.master.expect("a master").host, "node1");
        // MPICH's launcher inside a Slurm job: one task per host.
        variables.extend([("MPI_LOCALRANKID", "1"), ("MPI_LOCALNRANKS", "2")]);
        variables[2] = ("SLURM_PROCID", "0");
        let launch = detect(&variables).expect("complete");
        assert_eq!((launch.source, launch.rank), ("MPICH", 1));
    }

    #[test]
    fn kubernetes() {
        let mut variables = vec![
            ("JOB_COMPLETION_INDEX", "1"),
            ("WORLD_SIZE", "2"),
            ("MASTER_ADDR", "job-0.job"),
        ];
        let launch = detect(&variables).expect("complete");
        assert_eq!((launch.rank, launch.source), (1, "Kubernetes"));
        assert_eq!(launch.master.expect("set").port, DEFAULT_PORT);
        variables.remove(1);
        let error = detect(&variables).expect_err("no world size");
        assert!(error.message.contains("missing: WORLD_SIZE"), "{error}");
    }

    #[test]
    fn a_world_of_one_needs_no_master() {
        let launch = detect(&[("RANK", "0"), ("WORLD_SIZE", "1")]).expect("complete");
        assert_eq!(launch.master, None);
    }

    #[test]
    fn what_is_wrong_is_said() {
        for (variables, says) in [
            (&[][..], "missing: RANK, WORLD_SIZE (set: none)"),
            (&[("WORLD_SIZE", "2")], "(set: WORLD_SIZE=2)"),
            (&[("RANK", "0")], "missing: WORLD_SIZE (set: RANK=0)"),
            (
                &[("RANK", "0"), ("WORLD_SIZE", "2")],
                "missing: MASTER_ADDR, MASTER_PORT",
            ),
            (
                &[("RANK", "2"), ("WORLD_SIZE", "2")],
                "rank 2 is not below the world size 2",
            ),
            (&[("RANK", "two"), ("WORLD_SIZE", "2")], "RANK is \"two\""),
            (
                &[("RANK", "0"), ("WORLD_SIZE", "0")],
                "not below the world size 0",
            ),
            (
                &[
                    ("SLURM_PROCID", "0"),
                    ("SLURM_NTASKS", "4"),
                    ("WORLD_SIZE", "2"),
                ],
                "WORLD_SIZE is 2, but Slurm says 4",
            ),
            (
                &[("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_PORT", "70000")],
                "MASTER_PORT is 70000",
            ),
        ] {
            let error = detect(variables).expect_err(says);
            assert_eq!(error.code, Code::InvalidArgument);
            assert!(error.message.contains(says), "{says}: {error}");
            assert!(error.message.contains("unisono launch -n 2"), "{error}");
        }
    }

    proptest! {
        #[test]
        fn no_value_panics(values in prop::collection::vec("[0-9a-z,\\[\\]-]{0,8}", 12)) {
            let names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "PMI_RANK",
                "PMI_SIZE", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_JOB_NODELIST", "SLURM_JOB_ID",
                "JOB_COMPLETION_INDEX"];
            let variables: Vec<_> =
                names.iter().zip(&values).map(|(name, value)| (*name, value.as_str())).collect();
            let _ = detect(&variables);
        }
    }
}
