//! The launchers, and what each one's variables say.
//!
//! They are asked in this order, because the inner one knows better: torchrun inside a Slurm job starts several ranks per
//! task, and `mpirun` under Slurm starts one daemon per task. (Slurm may itself set MPICH's rank for its tasks, but not
//! the variables about the host that MPICH's own launcher sets.) `WORLD_SIZE`, `MASTER_ADDR` and `MASTER_PORT` may be
//! set under every launcher; they give the meeting point and must not contradict the launcher.

use sha2::{Digest, Sha256};

use super::variables::Variables;
use super::{Launch, Master};
use crate::error::Result;

/// The port that is taken where the launcher implies none and one job has the host to itself.
pub(super) const DEFAULT_PORT: u16 = 29500;

/// The variables by which one launcher speaks.
pub(super) struct Launcher {
    name: &'static str,
    pub(super) rank: &'static str,
    /// The world size; the first that is set counts.
    pub(super) world: &'static [&'static str],
    pub(super) local_rank: &'static [&'static str],
    pub(super) local_world: &'static [&'static str],
    /// The name of the job; the first that is set counts.
    job: &'static [&'static str],
}

pub(super) const LAUNCHERS: &[Launcher] = &[
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
    pub(super) fn is_slurm_in_disguise(&self, variables: &Variables<'_>) -> bool {
        self.rank == "PMI_RANK"
            && variables.text("SLURM_PROCID").is_some()
            && self
                .local_rank
                .iter()
                .all(|name| variables.text(name).is_none())
    }

    pub(super) fn launch(&self, variables: &Variables<'_>, parent: u32) -> Result<Launch> {
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
