for lr in 0.01 0.003
do
    for init in 0.1 0.02
    do
        sbatch --job-name=grid-lr$lr-init$init grid_job.slurm $lr $init
    done
done
