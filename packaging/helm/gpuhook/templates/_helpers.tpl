{{/* Whether the plugin is a unit of the nodes' systemd: "true" or nothing. */}}
{{- define "gpuhook.unit" -}}
{{- if or (has .Values.mode (list "cdi" "nri")) (and .Values.mps (ne .Values.mode "remove")) }}true{{ end }}
{{- end }}

{{/* The folder with containerd's configuration, and the one where its shims note their containers. */}}
{{- define "gpuhook.places" -}}
k3s: {folder: /var/lib/rancher/k3s/agent/etc/containerd, state: /run/k3s/containerd}
rke2: {folder: /var/lib/rancher/rke2/agent/etc/containerd, state: /run/k3s/containerd}
microk8s: {folder: /var/snap/microk8s/current/args, state: /var/snap/microk8s/common/run/containerd}
k0s: {folder: /etc/k0s, state: /run/k0s/containerd}
{{- end }}

{{/* Errors that values.schema.json can't express. */}}
{{- define "gpuhook.checked" -}}
{{- if regexMatch "(@|:[^/]*$)" .Values.image.repository }}
{{- fail (printf "image.repository is %s: put the tag into image.tag, and name no digest" .Values.image.repository) }}
{{- end }}
{{- if and (eq .Values.image.repository "localhost/gpuhook") (not .Values.image.local) }}
{{- fail "no registry has localhost/gpuhook: set image.repository to the image in your registry (scripts/build-image, podman push), or image.local=true once every node has imported it (ctr -n k8s.io images import)" }}
{{- end }}
{{- if and .Values.installer.distribution (ne .Values.installer.engine "containerd") }}
{{- fail (printf "installer.distribution is %v, whose engine is containerd and not %v" .Values.installer.distribution .Values.installer.engine) }}
{{- end }}
{{- if and .Values.mps (not (has .Values.mode (list "runtime" "environment" "remove"))) }}
{{- fail (printf "mps needs mode runtime or environment, which has gpu-py, and mode is %q" .Values.mode) }}
{{- end }}
{{- end }}

{{- define "gpuhook.image" -}}
image: {{ printf "%s:%s" .Values.image.repository (.Values.image.tag | default .Chart.AppVersion) | quote }}
imagePullPolicy: {{ .Values.image.pullPolicy | quote }}
{{- end }}

{{/* What all DaemonSets have in common; called with the context and a name. One that has an account of
its own speaks with the API server; with surge a new pod serves before the old one goes. */}}
{{- define "gpuhook.head" -}}
{{- include "gpuhook.checked" .context }}
apiVersion: apps/v1
kind: DaemonSet
metadata:
  name: {{ .name }}
  namespace: {{ .context.Release.Namespace | quote }}
  labels:
    app.kubernetes.io/name: {{ .name }}
spec:
  selector:
    matchLabels:
      app.kubernetes.io/name: {{ .name }}
  updateStrategy:
    type: RollingUpdate
    rollingUpdate:
      {{- if .surge }}
      maxSurge: 10%
      maxUnavailable: 0
      {{- else }}
      maxUnavailable: {{ ternary "100%" "10%" (and (eq .context.Values.mode "remove") (ne .name "gpuhook-metrics")) }}
      {{- end }}
  template:
    metadata:
      labels:
        app.kubernetes.io/name: {{ .name }}
      {{- with include "gpuhook.config" .context }}
      annotations:
        gpuhook/config: {{ . | sha256sum }}
      {{- end }}
    spec:
      serviceAccountName: {{ .account | default "gpuhook" }}
      automountServiceAccountToken: {{ hasKey . "account" }}
      enableServiceLinks: false
      priorityClassName: system-node-critical
      terminationGracePeriodSeconds: 30
      {{- with .context.Values.imagePullSecrets }}
      imagePullSecrets:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      nodeSelector:
        {{- toYaml .context.Values.nodeSelector | nindent 8 }}
      {{- include "gpuhook.affinity" .context | nindent 6 }}
      tolerations:
        {{- toYaml .context.Values.tolerations | nindent 8 }}
      securityContext:
        runAsUser: 0 # {{ .root }}
        seccompProfile:
          type: RuntimeDefault
{{- end }}

{{/* Any of the labels selects a node. */}}
{{- define "gpuhook.affinity" -}}
{{- with .Values.nodeLabels }}
affinity:
  nodeAffinity:
    requiredDuringSchedulingIgnoredDuringExecution:
      nodeSelectorTerms:
        {{- range . }}
        - matchExpressions:
            - {key: {{ . | quote }}, operator: In, values: ["true"]}
        {{- end }}
{{- end }}
{{- end }}

{{- define "gpuhook.config" -}}
{{- with .Values.config }}
config.toml: {{ . | quote }}
{{- end }}
{{- with .Values.devicePluginConfig }}
device-plugin.yaml: {{ . | quote }}
{{- end }}
{{- end }}

{{- define "gpuhook.env" -}}
{{- range $name, $value := . }}
- name: {{ $name | quote }}
  value: {{ kindIs "string" $value | ternary $value (toJson $value) | quote }}
{{- end }}
{{- end }}

{{/* The plugin's variables: those of the mode, and yours, which count before them. */}}
{{- define "gpuhook.options" -}}
{{- $strategy := get (dict "mounts" "mounts" "runtime" "volume-mounts" "environment" "envvar" "nri" "envvar") .Values.mode | default "cdi-cri" }}
{{- $found := dict "DEVICE_LIST_STRATEGY" $strategy "FAIL_ON_INIT_ERROR" "false" }}
{{- include "gpuhook.env" (merge (dict) .Values.devicePlugin.env $found) }}
{{- end }}

{{- define "gpuhook.driver-root" -}}
# The driver: its library, its nodes in /dev, and what it shows in /proc and /sys.
- name: driver-root
  hostPath: {path: {{ .Values.driverRoot | quote }}, type: {{ ternary "Directory" "DirectoryOrCreate" (eq .Values.driverRoot "/") }}}
{{- end }}

{{- define "gpuhook.confined" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: ["ALL"]
{{- end }}

{{- define "gpuhook.waits" -}}
- name: {{ .name }}
  {{- include "gpuhook.image" .context | nindent 2 }}
  command: ["/usr/bin/install-node"]
  args: ["wait"]
  securityContext:
    {{- include "gpuhook.confined" . | nindent 4 }}
{{- end }}
